"""Engines that come and go leave nothing: threads, file descriptors, memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from checkpoints import make
from processes import held, resident_bytes
from test_executor import Bench

from hocket.overlap.executor import EXECUTORS, UBatchExecutor

CYCLES, WARM_UP = 500, 100
MAX_GROWTH_BYTES = 4 << 20
"""Of resident memory from the end of the warm-up to the end: under 11 kB a cycle, where one leaked thread stack, KV
cache or set of activations would be more."""


def assert_no_growth(cycle: Callable[[], None], cycles: int, warm_up: int, max_growth_bytes: int) -> None:
    for _ in range(warm_up):
        cycle()
    gc.collect()
    before, bytes_before = held(), resident_bytes()
    for _ in range(cycles - warm_up):
        cycle()
    gc.collect()
    assert held() == before
    assert resident_bytes() - bytes_before < max_growth_bytes


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make("v2", tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("kind", EXECUTORS)
def test_overlap_may_start_and_stop_500_times(bench: Bench, kind: str) -> None:
    """Each time an executor is made, runs one split step and is closed; every tenth step fails."""
    others = set(threading.enumerate())
    cycles = iter(range(CYCLES))
    router = bench.layers[0].router
    choose = router.forward

    def fails(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError("planted")

    def cycle() -> None:
        executor = UBatchExecutor(bench.model, kind, 2, 10.0, torch.device("cpu"))
        if next(cycles) % 10 == 0:
            router.forward = fails  # type: ignore[method-assign]
            with pytest.raises(Exception, match="planted"):
                bench.run(executor, 2)
            router.forward = choose  # type: ignore[method-assign]
        else:
            bench.run(executor, 2)
        executor.close()

    assert_no_growth(cycle, CYCLES, WARM_UP, MAX_GROWTH_BYTES)
    assert set(threading.enumerate()) <= others


def test_a_leak_is_noticed(bench: Bench) -> None:
    """The same check on executors that nobody closes."""
    kept = []

    def cycle() -> None:
        kept.append(UBatchExecutor(bench.model, "thread", 2, 10.0, torch.device("cpu")))

    with pytest.raises(AssertionError):
        assert_no_growth(cycle, 4, 2, MAX_GROWTH_BYTES)
    for executor in kept:
        executor.close()
