"""What ranks note of where they are, what the front makes of it, and the watchdog that reads it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.dist.exchange import Recorded, SoloExchange
from hocket.dist.record import (
    COMPUTES,
    IN_EXCHANGE,
    RESTS,
    Record,
    Records,
    Whereabouts,
    apart,
    behind,
    described,
    elsewhere,
    lifeless,
)
from hocket.dist.watchdog import Watchdog
from hocket.errors import RankLost
from hocket.ubatch.lanes import InlineLane, Lane, WorkerLane

LIMIT_S = 0.2


def where(transfers: int, name: str = "ub0 dispatch send") -> Whereabouts:
    return Whereabouts(steps=3, state=COMPUTES, transfers=transfers, is_busy=True, name=name)


def test_others_read_what_a_rank_wrote(tmp_path: Path) -> None:
    front = Records(tmp_path, 3, create=True)
    assert front.read() == {}
    theirs = Records(tmp_path, 3, create=False)
    record = theirs.own(1)
    record.enter(COMPUTES)
    record.begin_transfer("ub1 combine recv and a name that is longer than its place")
    assert list(front.read()) == [1]
    assert described(front.read()).startswith("rank 1: step 1, in transfer 1 (ub1 combine recv ")
    record.end_transfer()
    record.enter(RESTS)
    assert described(front.read()) == "rank 1: step 1, after transfer 1, between steps"
    record.restart()
    assert front.read() == {}
    front.close()


def test_who_is_behind_and_who_is_elsewhere() -> None:
    assert behind({}) == set() == apart({})
    assert behind({0: where(5), 1: where(4), 2: where(5)}) == {1}
    assert behind({0: where(5), 1: where(5)}) == set()
    assert apart({0: where(5), 1: where(5), 2: where(5, "ub0 combine send")}) == {2}
    assert apart({0: where(5), 1: where(5, "ub0 combine send")}) == {0, 1}
    assert apart({0: where(5), 1: where(5)}) == set()
    # One that goes on is at the next transfer; one that has left a transfer out is at the same by another number.
    ahead = {0: where(82, "ub1 dispatch send"), 1: where(82, "ub0 combine send"), 2: where(83, "ub0 combine send")}
    assert apart(ahead) == {1}
    assert elsewhere(ahead, 0) == {0, 2}
    assert elsewhere(ahead, 2) == {2}
    assert elsewhere(ahead, 3) == elsewhere({0: where(1), 1: where(1)}, 0) == set()
    assert apart({0: where(76, "b"), 1: where(78, "d"), 2: where(76, "b")}) == {1}
    assert apart({0: where(82, "ub1 dispatch send"), 1: where(83, "ub0 combine send")}) == set()


def test_whose_process_has_not_run_for_long() -> None:
    found = {rank: replace(where(5), silent_s=silent_s) for rank, silent_s in enumerate((0.3, 4.0, 0.0))}
    assert lifeless(found, 1.5) == {1}
    assert lifeless(found, 4.0) == set()


def test_the_watchdog_says_that_the_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of an hour as often as with one of seconds, and also while the rank does nothing."""
    front = Records(tmp_path, 1, create=True)
    record = front.own(0)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic_ns", lambda: 0)
        record.beat()
    record.enter(COMPUTES)
    record.enter(RESTS)
    assert front.read()[0].silent_s > 5.0, "nobody has looked, and the clock began longer ago"
    dog = Watchdog(record, 3600.0, lambda: None)
    deadline = time.monotonic() + 20.0
    while front.read()[0].silent_s > 5.0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert front.read()[0].silent_s < 5.0
    dog.close()


@pytest.mark.parametrize("kind", [InlineLane, WorkerLane])
def test_lanes_record_transfers_up_to_the_one_that_failed(kind: type) -> None:
    record = Record()
    lane: Lane = InlineLane(record) if kind is InlineLane else WorkerLane(10.0, record=record)

    def fails() -> None:
        raise RankLost("planted")

    lane.launch(lambda: None, "first").wait()
    lane.launch(lambda: None, "second").wait()
    for _ in range(2):
        with pytest.raises(RankLost):
            lane.launch(fails, "third").wait()
        if kind is InlineLane:
            break
    lane.close()
    assert (record.transfers, record.is_busy) == (3, True)


def test_the_exchange_is_recorded() -> None:
    record = Record()
    exchange = Recorded(SoloExchange(), record)
    for step in (1, 2):
        exchange.exchange([0, 0])
        assert (record.steps, record.state) == (step, COMPUTES)
    exchange.close()


class Moving(Record):
    """Gets on between any two looks at it."""

    @property
    def transfers(self) -> int:
        self._looks = getattr(self, "_looks", 0) + 1
        return self._looks

    @transfers.setter
    def transfers(self, value: int) -> None:
        pass


def barks(record: Record) -> bool:
    """Whether the watchdog calls, if it has five times the limit."""
    called = threading.Event()
    dog = Watchdog(record, LIMIT_S, called.set)
    found = called.wait(5 * LIMIT_S)
    dog.close()
    return found


def test_the_watchdog_calls_for_compute_that_stands_still() -> None:
    record = Record()
    record.enter(COMPUTES)
    began, called = time.monotonic(), threading.Event()
    dog = Watchdog(record, LIMIT_S, called.set)
    assert called.wait(30.0)
    assert time.monotonic() - began >= LIMIT_S
    dog.close()


def test_the_watchdog_leaves_those_alone_who_wait_or_get_on() -> None:
    moving = Moving()
    moving.enter(COMPUTES)
    assert not barks(moving)
    for state in (RESTS, IN_EXCHANGE):
        record = Record()
        record.enter(state)
        assert not barks(record)
    record = Record()
    record.enter(COMPUTES)
    record.begin_transfer("ub0 dispatch send")
    assert not barks(record)
