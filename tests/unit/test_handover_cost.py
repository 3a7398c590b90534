"""What a hand-over costs, as the engine makes it: CPU time, best of many, so that other programs count little."""

from __future__ import annotations

import time

import pytest
import torch

from hocket.bench.handover import LIMIT_S
from hocket.config.backends import EXECUTORS
from hocket.overlap.thread_state import make_baton
from hocket.ubatch.baton import Baton

pytestmark = pytest.mark.alone
LIMITS_US = {"greenlet": 1.0, "thread": 50.0}
ROUNDS, RUNS = 5_000, 12


def cpu_us_of(baton: Baton) -> float:
    def body(idx: int) -> None:
        for _ in range(ROUNDS):
            baton.hand_over(idx)

    started = time.process_time()
    outcomes = baton.run([lambda: body(0), lambda: body(1)])
    used = time.process_time() - started
    assert not any(outcome.error for outcome in outcomes)
    return used / (2 * ROUNDS) * 1e6


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_hand_over_is_cheap(kind: str) -> None:
    baton = make_baton(kind, 2, LIMIT_S, torch.device("cpu"))
    with torch.inference_mode():
        best = min(cpu_us_of(baton) for _ in range(RUNS))
    baton.close()
    print(f"{kind}: {best:.2f} µs")
    assert best < LIMITS_US[kind]
