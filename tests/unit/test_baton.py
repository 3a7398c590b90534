"""Turns among ubatches: strict alternation, outcomes by index, failures, time-outs; both executors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import BatonTimeout
from hocket.ubatch.baton import Baton, GreenletBaton, ThreadBaton

KINDS: list[type[Baton]] = [ThreadBaton, GreenletBaton]
LIMIT_S = 10.0


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def baton(request: pytest.FixtureRequest) -> Iterator[Baton]:
    made = request.param(4, LIMIT_S)
    yield made
    made.close()


def program(baton: Baton, log: list[tuple[int, int]], idx: int, parts: int, fails: bool) -> Callable[[], Any]:
    def body() -> int:
        for part in range(parts):
            log.append((idx, part))
            if fails and part == parts - 1:
                raise ValueError(f"body {idx}")
            if part < parts - 1:
                baton.hand_over(idx)
        return idx * 100

    return body


def expected_order(parts: list[int]) -> list[tuple[int, int]]:
    """Round and round over those that have parts left."""
    order, position = [], [0] * len(parts)
    idx = 0
    while any(done < count for done, count in zip(position, parts, strict=True)):
        if position[idx] < parts[idx]:
            order.append((idx, position[idx]))
            position[idx] += 1
        idx = (idx + 1) % len(parts)
    return order


@settings(max_examples=5000, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4))
def test_strict_alternation_whatever_fails(baton: Baton, programs: list[tuple[int, bool]]) -> None:
    log: list[tuple[int, int]] = []
    outcomes = baton.run([program(baton, log, i, n, fails) for i, (n, fails) in enumerate(programs)])
    assert log == expected_order([n for n, _ in programs])
    for idx, ((_, fails), outcome) in enumerate(zip(programs, outcomes, strict=True)):
        assert (outcome.error is not None) == fails
        assert outcome.value == (None if fails else idx * 100)


def test_each_body_has_its_own_context_variables(baton: Baton) -> None:
    mine: ContextVar[int] = ContextVar("mine", default=-1)

    def body_of(idx: int) -> Callable[[], bool]:
        def body() -> bool:
            mine.set(idx)
            for _ in range(3):
                baton.hand_over(idx)
                if mine.get() != idx:
                    return False
            return True

        return body

    assert all(outcome.value for outcome in baton.run([body_of(i) for i in range(3)]))
    assert mine.get() == -1


def test_a_thread_that_keeps_the_baton_is_named() -> None:
    baton = ThreadBaton(2, 0.2)

    def stuck() -> None:
        baton.hand_over(1)
        time.sleep(1.0)

    with pytest.raises(BatonTimeout, match="ubatch 1 has held the baton"):
        baton.run([lambda: [baton.hand_over(0) for _ in range(3)], stuck])


def test_many_hand_overs_may_take_longer_than_the_limit() -> None:
    baton = ThreadBaton(2, 0.3)

    def body_of(idx: int) -> Callable[[], None]:
        def body() -> None:
            for _ in range(5):
                time.sleep(0.05)
                baton.hand_over(idx)

        return body

    assert all(outcome.error is None for outcome in baton.run([body_of(0), body_of(1)]))
    baton.close()


def test_threads_enter_their_set_up_once() -> None:
    import contextlib

    entered = []

    @contextlib.contextmanager
    def setup() -> Iterator[None]:
        entered.append(1)
        yield

    baton = ThreadBaton(2, LIMIT_S, setup)
    for _ in range(3):
        baton.run([lambda: None, lambda: None])
    baton.close()
    assert len(entered) == 2
