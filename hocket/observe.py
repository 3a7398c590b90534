"""What the front may ask of a rank's engine beside work: counters, spans, hidden states, kernels, replays of a graph.

Knows nothing of the group of ranks, of waves or of how answers travel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, ClassVar

from hocket.channel.messages import (
    Counters,
    CountKernels,
    FromRank,
    GetCounters,
    GetSpans,
    GetStates,
    GetStats,
    Lanes,
    RecordStates,
    RecordSteps,
    SetThresholds,
    Spans,
    Stats,
    TimeLanes,
    TimeReplays,
)
from hocket.engine import Engine
from hocket.overlap.vote import StepPlan
from hocket.trace.spans import Recorder
from hocket.worker.graphs import name_of
from hocket.worker.kernel_count import KernelCount
from hocket.worker.kernel_profile import KernelProfile
from hocket.worker.lane_times import LaneTimes

Measure = SetThresholds | TimeReplays | TimeLanes
"""What is done while all ranks sleep."""


class Observer:
    """Looks at one engine. time_limit: bounds what is done inside (`worker.capture.TimeLimit`)."""

    def __init__(self, engine: Engine, rank: int, time_limit: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._engine = engine
        self._rank = rank
        self._time_limit = time_limit
        self._kernels: KernelCount | None = None
        self._replay_us: float | None = None
        self._asked: list[Measure] = []  # for when all ranks sleep

    def answer(self, question: Any) -> FromRank | None:
        """What the front is told; None: nothing, it only gave an order. KeyError for what is none of `QUESTIONS`."""
        return self.QUESTIONS[type(question)](self, question)

    def step(self, plan: StepPlan) -> None:
        """A step by `plan` has been launched."""
        if self._kernels is not None:
            self._kernels.step(plan)

    def rest(self) -> list[FromRank]:
        """All ranks sleep, or are about to: none of them waits for another one in a step. What was asked for such a
        time is done; returns what the front is told."""
        asked, self._asked = self._asked, []
        return [answer for order in asked if (answer := self._measure(order)) is not None]

    def _measure(self, order: Measure) -> FromRank | None:
        if isinstance(order, SetThresholds):
            self._engine.set_thresholds(order.decode, order.prefill)
            return None
        self._engine.scheduler.forget_prefixes()  # what is timed writes to blocks, whatever they hold
        if isinstance(order, TimeReplays):
            with self._time_limit(f"replaying the {name_of(order.size, order.num_ubatches)}"):
                graph = self._engine.runner.graphs[order.size, order.num_ubatches]
                self._replay_us = graph.replay_us(order.count)
            return None
        times = LaneTimes(self._engine.runner, order, self._time_limit)
        us = times.measure()
        return Lanes(rank=self._rank, us=us, bytes=times.num_bytes, captured=times.captured)

    def _stats(self, question: GetStats) -> Stats:
        engine = self._engine
        stats = {"rank": self._rank} | engine.stats.snapshot() | asdict(engine.scheduler.counters())
        if self._kernels is not None:
            stats["kernels"] = self._kernels.found
        if self._replay_us is not None:
            stats["replay_us"] = self._replay_us
        if question.reset:
            engine.stats.reset()
        return Stats(rank=self._rank, stats=stats)

    def _counters(self, _question: GetCounters) -> Counters:
        return Counters(rank=self._rank, stats={"rank": self._rank} | self._engine.counters())

    def _count_kernels(self, order: CountKernels) -> None:
        self._kernels = KernelCount(order.phase, order.num_tokens)

    def _when_resting(self, order: Measure) -> None:
        self._asked.append(order)
        self._replay_us = None

    def _record_steps(self, order: RecordSteps) -> None:
        self._take_recorder()
        recorder = Recorder(order.phase, order.skip, order.num_steps)
        executor = self._engine.runner.executor
        if executor.is_on_gpu:
            recorder.profile = KernelProfile.started(order.num_steps, is_early=order.skip == 0)
        executor.recorder = recorder

    def _spans(self, _question: GetSpans) -> Spans:
        recorder = self._take_recorder()
        if recorder is None:
            return Spans(rank=self._rank, steps=[])
        steps, profile = recorder.finished, recorder.profile
        if isinstance(profile, KernelProfile):
            profile.fill(self._engine.runner.executor.num_sparse_layers)
        return Spans(rank=self._rank, steps=[step for step in steps if step.spans])

    def _take_recorder(self) -> Recorder | None:
        """The one that recorded until now, if any did."""
        executor = self._engine.runner.executor
        recorder, executor.recorder = executor.recorder, None
        if recorder is not None and recorder.profile is not None:
            recorder.profile.stop()
        return recorder

    def _record_states(self, order: RecordStates) -> None:
        self._engine.runner.record_states(order.forced)

    def _states(self, question: GetStates) -> FromRank:
        return self._engine.runner.states_of(question.layer)

    QUESTIONS: ClassVar[dict[type, Callable[[Observer, Any], FromRank | None]]] = {
        GetStats: _stats,
        GetCounters: _counters,
        CountKernels: _count_kernels,
        SetThresholds: _when_resting,
        TimeReplays: _when_resting,
        TimeLanes: _when_resting,
        RecordSteps: _record_steps,
        GetSpans: _spans,
        RecordStates: _record_states,
        GetStates: _states,
    }
