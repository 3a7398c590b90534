"""A rank's step counters: how many steps, of what kind, and where their time went. Knows nothing of how steps run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

WINDOW = 4096
"""Durations kept per part for medians and spreads; sums go over all steps."""

PARTS = ("schedule", "exchange", "wait", "prepare", "forward", "sample", "commit", "channel")
"""exchange: the exchange itself, from the last rank's arrival on; wait: for ranks that came later than this one."""


class StepStats:
    """Counters since the start or the last reset.

    prompt_tokens: computed ones, again after a preemption; those taken from the prefix cache are not among them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.phases = dict.fromkeys(("prefill", "decode", "mixed", "idle"), 0)
        self.reasons: dict[str, dict[str, int]] = {}
        self.split = 0
        self.comm_us = self.exposed_us = 0.0
        self.failed = 0
        self.ubatch_tokens: dict[str, int] = {}
        self.requests_finished: dict[str, int] = {}
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._recent: dict[str, deque[float]] = {part: deque(maxlen=WINDOW) for part in PARTS}
        self._step_us: deque[float] = deque(maxlen=WINDOW)

    def count_step(
        self,
        phase: str,
        reason: str,
        durations_us: dict[str, float],
        ubatch_tokens: Sequence[int] = (),
        comm_us: float = 0.0,
        exposed_us: float = 0.0,
    ) -> None:
        """One step of `phase` that took `durations_us`, by part; `ubatch_tokens`: this rank's tokens in each ubatch;
        comm_us: the time of its transfers; exposed_us: the part of it that compute stood still for."""
        self._count(phase, reason)
        self.comm_us += comm_us
        self.exposed_us += exposed_us
        if len(ubatch_tokens) > 1:
            self.split += 1
            key = "+".join(map(str, ubatch_tokens))
            self.ubatch_tokens[key] = self.ubatch_tokens.get(key, 0) + 1
        total = 0.0
        for part, duration in durations_us.items():
            self._sums[part] += duration
            self._recent[part].append(duration)
            total += duration
        if durations_us:
            self._step_us.append(total)

    def count_failure(self, phase: str, reason: str) -> None:
        """One step that failed, here or on another rank."""
        self._count(phase, reason)
        self.failed += 1

    def _count(self, phase: str, reason: str) -> None:
        self.steps += 1
        self.phases[phase] += 1
        by_reason = self.reasons.setdefault(phase, {})
        by_reason[reason] = by_reason.get(reason, 0) + 1

    def count_finished(self, reason: str) -> None:
        self.requests_finished[reason] = self.requests_finished.get(reason, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values. Times in µs: `sum` over all steps, the rest over the last WINDOW steps."""
        return {
            "steps": self.steps,
            "phases": dict(self.phases),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "requests_finished": dict(self.requests_finished),
            "failed": self.failed,
            "overlap": {
                "steps": self.steps,
                "split": self.split,
                "reasons": {phase: dict(reasons) for phase, reasons in self.reasons.items()},
                "ubatch_tokens": dict(self.ubatch_tokens),
                "comm_us": self.comm_us,
                "exposed_comm_us": self.exposed_us,
            },
            "times_us": {part: _figures(self._recent[part], self._sums[part]) for part in PARTS},
            "step_us": _figures(self._step_us, sum(self._sums.values())),
        }


def _figures(recent: deque[float], total: float) -> dict[str, float]:
    if not recent:
        return {"sum": total, "median": 0.0, "p10": 0.0, "p90": 0.0}
    if len(recent) == 1:
        return {"sum": total, "median": recent[0], "p10": recent[0], "p90": recent[0]}
    tenths = statistics.quantiles(recent, n=10)
    return {"sum": total, "median": statistics.median(recent), "p10": tenths[0], "p90": tenths[8]}
