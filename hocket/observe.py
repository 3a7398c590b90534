"""What the front may ask of a rank's engine beside work: counters, spans, hidden states, kernels, replays of a graph.

Knows nothing of the group of ranks, of waves or of how answers travel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, ClassVar

from hocket.channel.messages import (
    CountKernels,
    FromRank,
    GetSpans,
    GetStates,
    GetStats,
    RecordStates,
    RecordSteps,
    Spans,
    Stats,
    TimeReplays,
)
from hocket.engine import Engine
from hocket.overlap.vote import StepPlan
from hocket.trace.spans import Recorder
from hocket.worker.kernel_count import KernelCount


class Observer:
    """Looks at one engine. time_limit: bounds what is done inside (`worker.graphs.TimeLimit`)."""

    def __init__(self, engine: Engine, rank: int, time_limit: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._engine = engine
        self._rank = rank
        self._time_limit = time_limit
        self._kernels: KernelCount | None = None
        self._replay_us: float | None = None
        self._asked_replays: TimeReplays | None = None

    def answer(self, question: Any) -> FromRank | None:
        """What the front is told; None: nothing, it only gave an order. KeyError for what is none of `QUESTIONS`."""
        return self.QUESTIONS[type(question)](self, question)

    def step(self, plan: StepPlan) -> None:
        """A step by `plan` has been launched."""
        if self._kernels is not None:
            self._kernels.step(plan)

    def rest(self) -> None:
        """All ranks sleep: none of them waits for another one in a step. Replays are timed then, if they were asked
        for."""
        asked, self._asked_replays = self._asked_replays, None
        if asked is not None:
            with self._time_limit(f"replaying the CUDA graph of {asked.size} rows"):
                self._replay_us = self._engine.runner.graphs[asked.size].replay_us(asked.count)

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

    def _count_kernels(self, order: CountKernels) -> None:
        self._kernels = KernelCount(order.phase, order.num_tokens)

    def _time_replays(self, order: TimeReplays) -> None:
        self._asked_replays, self._replay_us = order, None

    def _record_steps(self, order: RecordSteps) -> None:
        self._engine.runner.executor.recorder = Recorder(order.phase, order.skip, order.num_steps)

    def _spans(self, _question: GetSpans) -> Spans:
        executor = self._engine.runner.executor
        recorder, executor.recorder = executor.recorder, None
        return Spans(rank=self._rank, steps=[] if recorder is None else recorder.finished)

    def _record_states(self, order: RecordStates) -> None:
        self._engine.runner.record_states(order.forced)

    def _states(self, question: GetStates) -> FromRank:
        return self._engine.runner.states_of(question.layer)

    QUESTIONS: ClassVar[dict[type, Callable[[Observer, Any], FromRank | None]]] = {
        GetStats: _stats,
        CountKernels: _count_kernels,
        TimeReplays: _time_replays,
        RecordSteps: _record_steps,
        GetSpans: _spans,
        RecordStates: _record_states,
        GetStates: _states,
    }
