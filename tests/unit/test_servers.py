"""What servers of one group tell each other, over real sockets and without ranks: the first one and two others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
from test_hosts import AGREED, LIMIT_S, answer, free_port, joining

from hocket.channel.lobby import Leaving, Left, LobbyGuest, Waiting
from hocket.channel.messages import Failed, FrontMessage, Hello, NeedWake, Ready, Wake
from hocket.channel.rank import RankChannel
from hocket.config.hosts import HostConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist import guest as guest_module
from hocket.dist import hosts as hosts_module
from hocket.dist.hosts import FromElsewhere
from hocket.dist.launcher import RankGroup
from hocket.dist.servers import Lead, Member, Others, others_of
from hocket.errors import ConfigError, HocketError, RankLost, StepDesync, UBatchFailed


class Three:
    """Servers with rank 0, rank 1, and ranks 2 and 3, that have met. heard: what each was told since."""

    def __init__(self) -> None:
        port = free_port()
        self.all: list[Others] = []
        for first, count in ((0, 1), (1, 1), (2, 2)):
            config = HostConfig(world_size=4, num_ranks=count, start_rank=first, port=port, own_server=True)
            self.all.append(others_of(config, AGREED, LIMIT_S, None))
        threads = [threading.Thread(target=one.gather, args=(LIMIT_S,)) for one in self.all[1:]]
        for thread in threads:
            thread.start()
        self.all[0].gather(LIMIT_S)
        self.all[0].start("unused")
        for thread in threads:
            thread.join(LIMIT_S)
        self.heard: list[list[FromElsewhere]] = [[], [], []]

    def until(self, condition: Callable[[], bool]) -> None:
        """Let all look until it is so."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.heard
            for one, heard in zip(self.all, self.heard, strict=True):
                heard += one.check()
            time.sleep(0.002)


@pytest.fixture
def three() -> Iterator[Three]:
    made = Three()
    with ExitStack() as stack:
        for one in made.all:
            stack.callback(one.close, "the test is over")
        yield made


def loss_of(one: Others) -> HocketError:
    """What it learns from the others."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            one.check()
        except HocketError as error:
            return error
        time.sleep(0.002)
    raise AssertionError("nothing was lost")


def test_ranks_know_their_place_and_only_the_first_has_the_store(three: Three) -> None:
    lead, one, two = three.all
    assert isinstance(lead, Lead)
    assert isinstance(two, Member)
    places = [lead.rank_place(0), one.rank_place(1), two.rank_place(2), two.rank_place(3)]
    assert [env["RANK"] for env, _ in places] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env, _ in places] == ["0", "0", "0", "1"]
    assert len({env["MASTER_PORT"] for env, _ in places}) == 1
    assert [fd is None for _, fd in places] == [False, True, True, True]


def test_nobody_goes_before_the_ranks_of_all_are_ready(three: Three) -> None:
    lead, one, two = three.all
    assert (lead.unready, one.unready) == ([1, 2, 3], [0, 2, 3])
    lead.ready()
    one.ready()
    three.until(lambda: one.unready == [2, 3] == lead.unready)
    two.ready()
    three.until(lambda: lead.unready == one.unready == two.unready == [])


def test_who_has_work_wakes_all_ranks(three: Three) -> None:
    lead, one, _ = three.all
    asked = NeedWake(rank=1, wave=5)
    assert one.need_wake(asked) is False  # the first server says when
    three.until(lambda: three.heard[0] == [asked])
    assert lead.need_wake(asked) is True
    three.until(lambda: three.heard[1] == three.heard[2] == [Wake(wave=5)])


def test_one_that_is_told_to_end_tells_all_and_waits_for_all(three: Three) -> None:
    lead, one, two = three.all
    two.leave()
    three.until(lambda: all(three.heard[:2]))
    assert [type(message) for message in three.heard[0] + three.heard[1]] == [Leaving, Leaving]
    assert not three.heard[2]
    one.drained()
    three.until(lambda: lead.undrained == [2, 3])
    two.drained()
    lead.drained()
    three.until(lambda: not lead.undrained)
    assert (one.undrained, two.undrained) == ([0, 2, 3], [0, 1])
    lead.end()
    three.until(lambda: not one.undrained and not two.undrained)


def test_failures_are_judged_by_the_first_and_told_as_they_are(three: Three) -> None:
    lead, one, two = three.all
    failure = Failed(rank=3, kind="RankLost", message="the exchange failed", details="")
    assert isinstance(two, Member)
    two.report(failure)
    three.until(lambda: three.heard[0] == [failure])
    lead.close("rank 2 took one transfer for another", "StepDesync")
    for member in (one, two):
        error = loss_of(member)
        assert isinstance(error, StepDesync)
        assert str(error) == "rank 2 took one transfer for another"
        with pytest.raises(StepDesync):
            member.check()  # asked again it says the same


@pytest.mark.parametrize(("why", "expected"), [("rank 2 ended", "rank 2 ended"), ("", "was stopped while others ran")])
def test_one_that_goes_is_named_to_all(three: Three, why: str, expected: str) -> None:
    lead, one, two = three.all
    two.close(why)
    error = loss_of(lead)
    assert isinstance(error, RankLost)
    assert expected in str(error)
    assert "on host" in str(error)
    lead.close(str(error))
    assert expected in str(loss_of(one))


def test_a_first_server_that_is_stopped_ends_the_others(three: Three) -> None:
    lead, one, _ = three.all
    lead.close("")
    assert "server with rank 0" in str(loss_of(one))
    assert "was stopped while others ran" in str(loss_of(one))


def test_a_first_server_that_hangs_is_named_though_its_connection_stands(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "ALIVE_S", 0.05)
    monkeypatch.setattr(guest_module, "SILENCE_S", 1.5)
    until = time.monotonic() + 2.0
    three.until(lambda: time.monotonic() > until)  # all look, so nobody is missed
    _, one, two = three.all
    for other in (one, two):
        why = str(loss_of(other))
        assert "server with rank 0" in why
        assert "has not been heard of for 1.5 s" in why


def test_one_that_leaves_before_all_have_met_makes_room() -> None:
    lead = Lead(HostConfig(world_size=4, num_ranks=1, port=free_port(), own_server=True), AGREED)
    with ExitStack() as stack:
        stack.callback(lead.close, "the test is over")
        one, next_one = (stack.enter_context(closing(LobbyGuest("127.0.0.1", lead.config.port))) for _ in range(2))
        gathered = threading.Thread(target=lead.gather, args=(LIMIT_S,))
        gathered.start()
        one.send(joining(1, 2))
        assert answer(one, Waiting).missing == [3]
        one.send(Left(kind="RankLost", error="interrupted"))
        one.send(joining(1, 1))
        assert answer(one, Waiting).missing == [2, 3]
        next_one.send(joining(2, 2))
        gathered.join(LIMIT_S)
        assert not gathered.is_alive()


def test_servers_that_were_given_something_else_are_refused() -> None:
    first = HostConfig(world_size=2, num_ranks=1, port=free_port(), own_server=True)
    lead = others_of(first, AGREED, LIMIT_S, None)
    member = others_of(replace(first, start_rank=1), AGREED | {"model": "other"}, LIMIT_S, None)
    gathered = threading.Thread(target=pytest.raises, args=(RankLost, lead.gather, 2.0))
    gathered.start()
    with pytest.raises(ConfigError, match="model is 'other' on the host that joins and 'tiny' at the server"):
        member.gather(LIMIT_S)
    gathered.join(LIMIT_S)
    for one in (lead, member):
        one.close("the test is over")


# -- groups of ranks over them ----------------------------------------------------------------------------------------


class Groups:
    """A RankGroup for each server, and the ranks' ends of their channels."""

    def __init__(self, three: Three) -> None:
        self.told: list[list[str]] = [[], [], []]
        self.groups = [RankGroup(4, LIMIT_S, one, told.append) for one, told in zip(three.all, self.told, strict=True)]
        self.ranks: dict[int, RankChannel] = {}
        for group in self.groups:
            for rank in group.ranks:
                self.ranks[rank] = RankChannel(group._channel.address, rank)
                self.ranks[rank].send(Hello(rank=rank, pid=1))
        for group in self.groups:
            seen = set[int]()
            while seen < set(group.ranks):
                seen |= {message.rank for message in group.receive(0.1)}

    def received(self) -> dict[int, list[FrontMessage]]:
        """What each rank is told by the next round of looks."""
        for group in self.groups:
            group.receive(0.0)
        return {rank: channel.receive(block=False) for rank, channel in self.ranks.items()}

    def losses(self) -> list[HocketError | None]:
        """What each group ends with, all looking at the same time."""
        found: list[HocketError | None] = [None, None, None]

        def look(number: int) -> None:
            deadline = time.monotonic() + LIMIT_S
            try:
                while time.monotonic() < deadline:
                    self.groups[number].receive(0.05)
            except HocketError as error:
                found[number] = error

        threads = [threading.Thread(target=look, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
        return found

    def close(self) -> None:
        for channel in self.ranks.values():
            channel.close()
        for group in self.groups:
            group.kill("the test is over")


@pytest.fixture
def groups(three: Three) -> Iterator[Groups]:
    made = Groups(three)
    yield made
    made.close()


def test_groups_wake_all_ranks_once_a_wave(groups: Groups) -> None:
    told: dict[int, list[FrontMessage]] = {rank: [] for rank in range(4)}
    deadline = time.monotonic() + LIMIT_S
    for asks in (3, 0, 1):  # the others' asking comes too late
        groups.ranks[asks].send(NeedWake(rank=asks, wave=2))
        while not all(told.values()):
            assert time.monotonic() < deadline, told
            for rank, messages in groups.received().items():
                told[rank] += messages
    for _ in range(50):
        for rank, messages in groups.received().items():
            told[rank] += messages
        time.sleep(0.002)
    assert told == {rank: [Wake(wave=2)] for rank in range(4)}


def test_groups_wait_for_the_ranks_of_others_and_say_so(groups: Groups) -> None:
    config = resolve(Options.from_dict({"device": "cpu", "data_parallel_size": 4, "enable_expert_parallel": True}))
    done: dict[int, list[dict[str, Any]]] = {}
    threads = [
        threading.Thread(target=lambda n=n, group=group: done.update({n: group.configure(config)}))
        for n, group in enumerate(groups.groups)
    ]
    for thread in threads:
        thread.start()
    for rank in (0, 1, 2):
        groups.ranks[rank].send(Ready(rank=rank, info={"rank": rank}))
    for told in groups.told[:2]:
        wait_until(lambda told=told: "waiting for rank 2, 3 to become ready on another host" in told)  # type: ignore[misc]
    assert groups.told[2][-1] == "waiting for rank 3 to become ready"
    assert not done
    groups.ranks[3].send(Ready(rank=3, info={"rank": 3}))
    for thread in threads:
        thread.join(LIMIT_S)
    assert done == {0: [{"rank": 0}], 1: [{"rank": 1}], 2: [{"rank": 2}, {"rank": 3}]}


def test_all_groups_end_with_the_first_cause_wherever_it_was(groups: Groups) -> None:
    """Rank 3 only saw another one go; what happened to rank 1 is said later."""
    groups.ranks[3].send(Failed(rank=3, kind="RankLost", message="the exchange failed", details=""))
    late = threading.Timer(
        0.3, groups.ranks[1].send, (Failed(rank=1, kind="UBatchFailed", message="no memory", details="…"),)
    )
    late.start()
    found = groups.losses()
    late.join()
    assert [type(error) for error in found] == [UBatchFailed] * 3
    assert {str(error) for error in found} == {"no memory"}
    assert all(group.closed for group in groups.groups)


def test_a_rank_that_nobody_reports_is_named_to_all(groups: Groups) -> None:
    for rank in (0, 1, 3):
        groups.ranks[rank].send(Failed(rank=rank, kind="RankLost", message="the exchange failed", details=""))
    found = groups.losses()
    assert [type(error) for error in found] == [RankLost] * 3
    assert all(str(error).startswith("rank 2 stopped answering; first noticed by rank") for error in found)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
