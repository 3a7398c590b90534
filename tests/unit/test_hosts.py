"""Hosts of a server meet: who has which ranks, who is refused, who is missing; nothing of it needs a model."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hocket.channel.lobby import Alive, Join, LobbyGuest, RankEnded, Refused, Start, Waiting
from hocket.config.hosts import HostConfig
from hocket.dist import guest as guest_module
from hocket.dist import headless, names, processes
from hocket.dist import hosts as hosts_module
from hocket.dist.guest import Guest
from hocket.dist.headless import run_ranks
from hocket.dist.hosts import Hosts
from hocket.dist.interfaces import interface_to
from hocket.dist.roster import Roster
from hocket.errors import ConfigError, HocketError, RankLost

LIMIT_S = 20.0
AGREED = {"model": "tiny", "enable_dbo": True}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def joining(first: int, count: int, **more: Any) -> Join:
    given = {"host": f"host{first}", "start_rank": first, "num_ranks": count, "world_size": 4, "must_agree": AGREED}
    return Join(**(given | more))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """A server with rank 0 of four."""
    made = Hosts(HostConfig(world_size=4, num_ranks=1, port=free_port()), AGREED)
    yield made
    made.close("")


def guest_of(hosts: Hosts) -> LobbyGuest:
    return LobbyGuest("127.0.0.1", hosts.config.port)


def answer(guest: LobbyGuest, kind: type[Any]) -> Any:
    """The next message of this kind."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for message in guest.receive(0.1):
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__}")


# -- who has which ranks ----------------------------------------------------------------------------------------------


def test_ranks_are_missing_until_every_one_has_a_host() -> None:
    roster = Roster(4, range(1), AGREED)
    assert roster.missing(0.0) == [1, 2, 3]
    assert roster.join(b"b", joining(2, 2), 0.0) is None
    assert roster.missing(1.0) == [1]
    assert roster.join(b"c", joining(1, 1), 1.0) is None
    assert roster.missing(1.0) == []


def test_a_host_that_went_before_the_start_makes_room() -> None:
    roster = Roster(4, range(1), AGREED)
    assert roster.join(b"b", joining(2, 2), 0.0) is None
    why = roster.join(b"c", joining(1, 2), 1.0)
    assert why == "rank 2 is there twice: on host2 and on host1"
    roster.heard(b"b", 3.0)
    assert roster.missing(6.0) == [1]
    assert roster.missing(8.0) == [1, 2, 3]
    assert roster.join(b"c", joining(1, 2), 8.0) is None
    assert roster.silent(20.0) is None
    silent = roster.silent(24.0)
    assert silent is not None
    assert silent.join.host == "host1"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (joining(0, 1), "rank 0 is there twice: on the server's host and on host0"),
        (joining(1, 1, world_size=2), "--data-parallel-size is 2 on the host that joins and 4 at the server"),
        (joining(3, 2), "of 4"),
        (joining(-1, 2), "of 4"),
        (joining(1, 0), "of 4"),
        (
            joining(1, 1, must_agree=AGREED | {"enable_dbo": False}),
            "enable_dbo is False on the host that joins and True",
        ),
        (joining(1, 1, must_agree={"model": "tiny"}), "enable_dbo is not given on the host that joins"),
    ],
)
def test_what_does_not_fit_is_refused(message: Join, expected: str) -> None:
    why = Roster(4, range(1), AGREED).join(b"b", message, 0.0)
    assert why is not None
    assert expected in why


# -- over the network -------------------------------------------------------------------------------------------------


def test_missing_ranks_are_named_while_waiting_and_after_the_limit(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    monkeypatch.setattr(hosts_module, "REMIND_S", 0.1)
    with caplog.at_level(logging.WARNING), pytest.raises(RankLost, match=r"rank 1, 2, 3 came .* within 0\.5 s"):
        hosts.gather(0.5, told.append)
    assert "waiting for a host with rank 1, 2, 3: 0 of 0.5 s" in caplog.text
    assert set(told) == {"waiting for a host with rank 1, 2, 3"}


def test_hosts_meet_and_start_and_one_that_goes_is_named(hosts: Hosts) -> None:
    gathered = threading.Thread(target=hosts.gather, args=(LIMIT_S,))
    gathered.start()
    one, twice, other = guest_of(hosts), guest_of(hosts), guest_of(hosts)
    one.send(joining(1, 2))
    assert answer(one, Waiting).missing == [3]
    twice.send(joining(2, 2))
    assert answer(twice, Refused).message == "rank 2 is there twice: on host1 and on host2"
    other.send(joining(3, 1))
    gathered.join(LIMIT_S)
    assert not gathered.is_alive()
    hosts.start("tcp://front")
    assert answer(one, Start).channel == answer(other, Start).channel == "tcp://front"
    twice.send(joining(3, 1))
    other.send(Alive())
    other.send(RankEnded(rank=3, how="exit code 7"))
    with pytest.raises(RankLost, match=r"rank 3 ended unexpectedly on host host3 \(exit code 7\)"):  # noqa: PT012
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            hosts.check()
            time.sleep(0.01)
    for guest in (one, twice, other):
        guest.close()


def test_who_has_another_secret_cannot_say_a_word(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_CLUSTER_SECRET", "another")
    stranger = guest_of(hosts)
    stranger.send(joining(1, 3))
    deadline = time.monotonic() + LIMIT_S
    while not stranger.wrong_key:
        assert time.monotonic() < deadline
        assert stranger.receive(0.05) == []
    with pytest.raises(RankLost, match="rank 1, 2, 3"):
        hosts.gather(0.3)
    stranger.close()


def test_what_is_no_message_disturbs_nobody(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    guest = guest_of(hosts)
    guest._socket.send(b"\x80\x04\x95pickled?")
    with socket.create_connection(("127.0.0.1", hosts.config.port), LIMIT_S) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        guest.send(joining(1, 3))
        hosts.gather(LIMIT_S)
    assert "another host sent what is no message" in caplog.text
    (name,) = hosts._roster.guests
    hosts._lobby._socket.send_multipart((name, b"\x80\x04\x95pickled?"))
    hosts.start("tcp://front")
    assert answer(guest, Start).channel == "tcp://front"
    assert "the server sent what is no message" in caplog.text
    guest.close()


def test_a_headless_host_says_what_it_waits_for_and_why_it_was_refused(hosts: Hosts) -> None:
    wrong = HostConfig(
        world_size=4, num_ranks=1, start_rank=1, address="127.0.0.1", port=hosts.config.port, headless=True
    )

    def gather() -> None:
        with pytest.raises(RankLost):
            hosts.gather(3.0)

    server = threading.Thread(target=gather)
    server.start()
    with pytest.raises(ConfigError, match="model is 'other' on the host that joins and 'tiny' at the server"):
        run_ranks(wrong, AGREED | {"model": "other"}, LIMIT_S)
    server.join(LIMIT_S)
    alone = HostConfig(world_size=4, num_ranks=1, start_rank=1, port=free_port(), headless=True)
    with pytest.raises(HocketError, match=r"no server let this host in at 127\.0\.0\.1:\d+ within 0\.5 s") as caught:
        run_ranks(alone, AGREED, 0.5)
    assert not isinstance(caught.value, RankLost)  # which a host that starts anew would try again for ever


@pytest.mark.parametrize("is_told", [False, True])
def test_a_host_that_was_told_to_end_does_not_start_anew(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    def run(_: Any, start: Any) -> None:
        if is_told:
            signal.raise_signal(signal.SIGTERM)
        raise RankLost("the server's host went away")

    monkeypatch.setattr(headless._Headless, "join", lambda _: None)
    monkeypatch.setattr(headless._Headless, "run", run)
    host = HostConfig(world_size=4, num_ranks=1, start_rank=1, port=free_port(), headless=True)
    with pytest.raises(HocketError, match="went away") as caught:
        run_ranks(host, AGREED, LIMIT_S)
    assert isinstance(caught.value, RankLost) == (not is_told)


def test_a_host_that_starts_anew_is_not_refused_for_what_it_was(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(guest_of(hosts)) as guest:
        guest.send(joining(1, 3))
        hosts.gather(LIMIT_S)
    hosts.start("tcp://front")
    (old,) = hosts._roster.guests
    sent: list[Any] = []
    monkeypatch.setattr(hosts._lobby, "send", lambda to, message: sent.append(message))
    with pytest.raises(RankLost, match="rank 2 ended"):
        hosts._handle([(b"new", joining(1, 3)), (old, RankEnded(rank=2, how="exit code 7"))], [])
    assert sent == []


@pytest.mark.parametrize(
    ("address", "secret", "is_warned"), [("0.0.0.0", "", True), ("0.0.0.0", "x", False), ("127.0.0.1", "", False)]
)
def test_hosts_that_anybody_can_join_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, secret: str, is_warned: bool
) -> None:
    monkeypatch.setenv("HOCKET_CLUSTER_SECRET", secret)
    Hosts(HostConfig(world_size=4, num_ranks=1, address=address, port=free_port()), AGREED).close("")
    assert ("HOCKET_CLUSTER_SECRET" in caplog.text) == is_warned


def test_processes_that_a_driver_holds_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """A process that a kill does not end."""

        stdin = None

        def poll(self) -> None:
            return None

        def kill(self) -> None:
            pass

        def wait(self, timeout: float) -> None:
            waits.append(timeout)
            time.sleep(timeout)
            raise subprocess.TimeoutExpired("held", timeout)

    waits: list[float] = []
    held: list[Any] = [Held() for _ in range(5)]
    monkeypatch.setattr(processes, "_KILLED_S", 0.2)
    processes.end_all(held)
    assert len(waits) == 5
    assert sum(waits) <= 0.2


def test_an_address_of_another_host_or_a_taken_port_is_refused(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match="data_parallel_rpc_port"):
        Hosts(HostConfig(world_size=4, num_ranks=1, port=hosts.config.port), AGREED)
    with pytest.raises(ConfigError, match=r"data_parallel_address: '192\.0\.2\.1'"):
        Hosts(HostConfig(world_size=4, num_ranks=1, address="192.0.2.1", port=free_port()), AGREED)


# -- names that come up late ------------------------------------------------------------------------------------------


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What "late.example" resolves to, look-up by look-up; "": nothing. The last stays."""
    answers: list[str] = []
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any) -> Any:
        if host != "late.example":
            return look_up(host, *rest)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if not answer:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(answer, *rest)

    monkeypatch.setattr(names.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(hosts_module, "REMIND_S", 0.0)
    monkeypatch.setattr(guest_module, "REMIND_S", 0.0)
    monkeypatch.setattr(guest_module, "ALIVE_S", 0.05)
    return answers


def test_a_server_waits_until_its_name_is_one_of_its_host(
    name_server: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    name_server += ["", "192.0.2.1", "127.0.0.1"]  # of the host that had the name before, in between
    told: list[str] = []
    config = HostConfig(world_size=4, num_ranks=1, address="late.example", port=free_port())
    found = Hosts(config, AGREED, LIMIT_S, told.append)
    found.close("")
    assert found.address == "127.0.0.1"
    assert told == ["waiting for late.example to be a name of this host"] * 2
    assert "Name or service not known" in caplog.text
    assert "Cannot assign requested address" in caplog.text


def test_a_server_does_not_wait_longer_nor_for_what_stays_wrong(name_server: list[str], hosts: Hosts) -> None:
    name_server += [""]
    with pytest.raises(ConfigError, match=r"data_parallel_address: 'late\.example' .*Name or service not known"):
        Hosts(HostConfig(world_size=4, num_ranks=1, address="late.example", port=free_port()), AGREED, 0.3)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="data_parallel_address"):
        Hosts(HostConfig(world_size=4, num_ranks=1, address="192.0.2.1", port=free_port()), AGREED, 60.0)
    name_server[:] = ["127.0.0.1"]
    with pytest.raises(ConfigError, match="data_parallel_rpc_port"):
        Hosts(replace(hosts.config, address="late.example"), AGREED, 60.0)
    assert time.monotonic() < began + 30


def test_a_host_waits_for_the_servers_name_and_for_the_server(
    name_server: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The name comes late, then is that of another host, then the server's, which is not there yet."""
    name_server += ["", "", "127.0.0.2", "127.0.0.1"]
    told: list[str] = []
    config = HostConfig(
        world_size=4, num_ranks=3, start_rank=1, address="late.example", port=free_port(), headless=True
    )
    guest = Guest(config, AGREED, LIMIT_S)
    joined: list[Any] = []
    thread = threading.Thread(target=lambda: joined.append(guest.join(told.append)))
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while len(name_server) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server = Hosts(HostConfig(world_size=4, num_ranks=1, port=config.port), AGREED)
    server.gather(LIMIT_S)
    server.start("tcp://front")
    thread.join(LIMIT_S)
    server.close("")
    guest.close()
    assert [type(message) for message in joined] == [Start]
    assert "waiting for the server" in told
    assert f"waiting for the server at late.example:{config.port}" in caplog.text
    assert "Name or service not known" in caplog.text


def test_a_host_waits_for_the_next_server_where_the_first_gave_up_without_a_word(hosts: Hosts) -> None:
    guest = Guest(
        HostConfig(world_size=4, num_ranks=2, start_rank=1, port=hosts.config.port, headless=True), AGREED, LIMIT_S
    )
    told: list[str] = []
    thread = threading.Thread(target=guest.join, args=(told.append,))
    thread.start()
    server = hosts
    deadline = time.monotonic() + LIMIT_S
    while "waiting for a host with rank 3" not in told:
        assert time.monotonic() < deadline
        server._handle(server._lobby.receive(0.05), [])
    hosts._roster.guests.clear()  # as if its process had been killed: nobody is told that it ends
    hosts.close("")
    server = Hosts(hosts.config, AGREED)
    with contextlib.closing(guest_of(server)) as last:
        last.send(joining(3, 1))
        server.gather(LIMIT_S)
        server.start("tcp://front")
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    server.close("")
    guest.close()


def test_a_waiting_host_speaks_once_a_second_however_fast_the_server_answers(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send = hosts._lobby.send
    monkeypatch.setattr(hosts._lobby, "send", lambda to, message: (sent.append(message), send(to, message)))
    config = HostConfig(world_size=4, num_ranks=1, start_rank=1, port=hosts.config.port, headless=True)
    guest = Guest(config, AGREED, LIMIT_S)
    gave_up: list[Exception] = []

    def join() -> None:
        try:
            guest.join()
        except RankLost as error:
            gave_up.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(RankLost, match="rank 2, 3"):
        hosts.gather(1.5)
    assert 1 <= len(sent) <= 3
    hosts.close("too few hosts")
    thread.join(LIMIT_S)
    assert len(gave_up) == 1
    guest.close()


def test_words_for_a_server_that_is_not_there_keep_nobody() -> None:
    guest = LobbyGuest("127.0.0.1", free_port())
    thread = threading.Thread(target=lambda: [guest.send(Alive()) for _ in range(1500)], daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    guest.close()


def test_the_interface_to_this_host() -> None:
    assert interface_to("127.0.0.1") == interface_to("127.0.0.2") == "lo"
    assert interface_to("no.such.host.invalid") is None


# -- flags ------------------------------------------------------------------------------------------------------------


def flags(world_size: int = 4, **given: Any) -> HostConfig | None:
    none = {"size_local": None, "start_rank": None, "address": None, "port": None, "headless": False}
    return HostConfig.from_flags(world_size, **(none | given))


def test_flags_of_one_host_and_of_many() -> None:
    assert flags() is None
    assert flags(size_local=4) is None
    server = flags(size_local=1, address="10.0.0.1")
    assert server is not None
    assert (server.ranks, server.headless) == (range(1), False)
    other = flags(size_local=2, start_rank=2, address="10.0.0.1", port=5, headless=True)
    assert other is not None
    assert (other.ranks, other.port) == (range(2, 4), 5)


def test_flags_of_a_server_on_every_host() -> None:
    for given in ({"rank": 3}, {"rank": 3, "external_lb": True, "size_local": 1, "start_rank": 3}):
        one = flags(**given)
        assert one is not None
        assert (one.ranks, one.own_server, one.is_first, one.address) == (range(3, 4), True, False, "127.0.0.1")
    first = flags(hybrid_lb=True, start_rank=0, size_local=2, address="10.0.0.1")
    assert first is not None
    assert (first.ranks, first.own_server, first.is_first) == (range(2), True, True)
    assert flags(hybrid_lb=True, start_rank=0, size_local=4) is None  # one server for all ranks is as ever


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"headless": True}, "data_parallel_size_local"),
        ({"headless": True, "size_local": 1}, "data_parallel_start_rank"),
        ({"headless": True, "size_local": 1, "start_rank": 1}, "data_parallel_address"),
        ({"headless": True, "size_local": 1, "start_rank": 0, "address": "a"}, "data_parallel_start_rank"),
        ({"headless": True, "size_local": 2, "start_rank": 3, "address": "a"}, "data_parallel_start_rank"),
        ({"size_local": 2, "start_rank": 1}, "data_parallel_start_rank"),
        ({"size_local": 5}, "data_parallel_size_local"),
        ({"address": "a"}, "data_parallel_size_local"),
        ({"world_size": 1, "size_local": 2}, "data_parallel_size_local"),
        ({"external_lb": True}, "data_parallel_rank: is missing"),
        ({"rank": 4}, "data_parallel_rank: 4 .* 0 to 3"),
        ({"rank": 0, "world_size": 1}, "data_parallel_size: 1"),
        ({"rank": 1, "size_local": 2}, "data_parallel_size_local: 2 .*hybrid"),
        ({"rank": 1, "start_rank": 2}, "data_parallel_start_rank: 2"),
        ({"rank": 1, "hybrid_lb": True}, "data_parallel_hybrid_lb"),
        ({"rank": 1, "headless": True, "address": "a"}, "headless"),
        ({"hybrid_lb": True, "size_local": 2}, "data_parallel_start_rank: is missing"),
        ({"hybrid_lb": True, "start_rank": 2}, "data_parallel_size_local: is missing"),
        ({"hybrid_lb": True, "start_rank": 3, "size_local": 2}, "data_parallel_start_rank: 3 .* 0 to 2"),
    ],
)
def test_flags_that_contradict_each_other(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        flags(**given)
