"""Without a recorder a step leaves no span, asks no clock for one, and allocates nothing for it."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from test_executor import Bench, bench, executor

from hocket.overlap.executor import UBatchExecutor
from hocket.trace import spans
from hocket.trace.spans import Recorder, Stage, Track

__all__ = ["bench", "executor"]
ROUNDS, TRIES = 1000, 5


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of record is made, and how often the module's clock is read."""
    found: Counter[str] = Counter()

    def counted(name: str, inner: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return inner(*args, **kwargs)

        return make

    for name in ("Span", "HandOver", "Step"):
        monkeypatch.setattr(spans, name, counted(name, getattr(spans, name)))

    class Clock:
        perf_counter_ns = staticmethod(counted("clock", spans.time.perf_counter_ns))

    monkeypatch.setattr(spans, "time", Clock)
    return found


def test_a_step_leaves_nothing(bench: Bench, executor: tuple[UBatchExecutor, int], made: Counter[str]) -> None:
    run, n = executor
    for count in (1, n):
        bench.run(run, count)
    assert not made
    run.recorder = Recorder()
    bench.run(run, n)
    assert made["Step"] == 1
    assert made["Span"] >= 5 * n * len(bench.layers), "the control: attention, experts and transfers of each layer"
    assert made["HandOver"] >= 2 * n * len(bench.layers) - 1


def test_stages_allocate_nothing() -> None:
    track = Track(0)

    def layer() -> None:
        for stage in (Stage.QKV, Stage.ATTENTION, Stage.DISPATCH, Stage.EXPERTS, Stage.COMBINE, Stage.SHARED):
            track.begin(stage)
        track.launched(Stage.DISPATCH, "send")
        track.interrupt(1, 2)
        track.pause()
        track.give(1)
        track.take()

    assert blocks_of(layer) < ROUNDS / 100
    recorder = Recorder()
    track = Track(0, recorder.begin("prefill", 1, 1))
    assert blocks_of(layer) > ROUNDS, "the control"


def blocks_of(layer: Any) -> int:
    """Blocks of memory that so many layers leave: the least of some tries, since other threads allocate too."""
    layer()
    found = []
    for _ in range(TRIES):
        before = sys.getallocatedblocks()
        for _ in range(ROUNDS):
            layer()
        found.append(sys.getallocatedblocks() - before)
    return min(found)


def test_only_the_steps_asked_for_are_recorded(bench: Bench, executor: tuple[UBatchExecutor, int]) -> None:
    run, n = executor
    run.recorder = Recorder(phase="prefill", skip=1, limit=2)
    bench.run(run, 1)  # skipped
    bench.run(run, n)
    bench.run(run, 1)
    bench.run(run, n)  # one too many
    steps = run.recorder.finished
    assert [step.num_ubatches for step in steps] == [n, 1]
    assert all(step.start_ns <= span.start_ns <= span.stop_ns <= step.stop_ns for step in steps for span in step.spans)
    run.recorder = Recorder(phase="decode")
    bench.run(run, n)
    assert not run.recorder.steps
