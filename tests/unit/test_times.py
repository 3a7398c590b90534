"""Where a step's time goes: by kind of transfer, and in hand-overs, as the trace of the same step has it."""

from __future__ import annotations

from test_executor import Bench, bench, executor

from hocket.overlap.executor import UBatchExecutor
from hocket.trace.figures import step_figures
from hocket.trace.spans import COMM, Recorder, Span, Stage
from hocket.ubatch.times import StepTimes, Traffic

__all__ = ["bench", "executor"]


def flights(spans: list[Span], stage: Stage) -> int:
    return sum(s.stop_ns - s.start_ns for s in spans if s.part == "flight" and s.stage is stage and s.lane == COMM)


def test_times_are_the_traces(bench: Bench, executor: tuple[UBatchExecutor, int]) -> None:
    run, n = executor
    for count in (1, n):
        run.recorder = Recorder()
        bench.run(run, count)
        (step,) = run.recorder.finished
        assert run.times.dispatch.ns == flights(step.spans, Stage.DISPATCH) > 0
        assert run.times.combine.ns == flights(step.spans, Stage.COMBINE) > 0
        assert run.times.comm_ns == run.times.dispatch.ns + run.times.combine.ns
        if count == 1:  # the caller's own thread ran them
            assert run.times.exposed_ns == run.times.comm_ns
        figures = step_figures([step])
        assert figures.num_hand_overs == len(step.hand_overs)
        assert 0 < run.times.hand_over_ns <= figures.hand_over_ns if count > 1 else run.times.hand_over_ns == 0
    run.recorder = None
    bench.run(run, n)
    assert 0 < run.times.hand_over_ns < 1e9, "of this step alone, whether it is recorded or not"


def test_sums() -> None:
    total = StepTimes()
    for _ in range(2):
        total.add(StepTimes(Traffic(1, 2, 3), Traffic(10, 20, 30), 100))
    assert (total.comm_ns, total.exposed_ns, total.comm_bytes, total.hand_over_ns) == (22, 44, 66, 200)
    total.take()
    assert total.hand_over_ns == 200, "nobody had given it"
