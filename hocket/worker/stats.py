"""A rank's step counters: how many steps, of what kind, and where their time went. Knows nothing of how steps run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.metrics.histogram import Histogram
from hocket.overlap.vote import Reason, StepPlan
from hocket.scheduler.batch import Phase
from hocket.ubatch.times import StepTimes
from hocket.worker.laps import PARTS
from hocket.worker.pace import Pace

WINDOW = 4096
"""Durations kept per part for medians and spreads; sums go over all steps."""
UBATCH_BOUNDS = (0, *(2**i for i in range(15)))
"""Buckets for the tokens of a ubatch."""
MOST_CUTS, OTHERS = 1000, "others"
"""Cuts of steps that are counted each by itself; more, as a server may have, together."""
KINDS = ("dispatch", "combine")
"""Of transfers."""


@dataclass(slots=True)
class StepRecord:
    """What one step was on this rank.

    phase: of this rank's own batch; a rank without requests is idle also where the others work. ubatches: (this rank's
    tokens, rows every rank counts) of each ubatch; empty where the model did not run. us: durations by part. times: of
    its transfers and hand-overs; is_timed: whether those of transfers are known, which a GPU does not tell. Nobody
    counts what a CUDA graph sends.
    """

    plan: StepPlan
    phase: Phase
    ubatches: tuple[tuple[int, int], ...] = ()
    us: Mapping[str, float] = field(default_factory=dict)
    has_failed: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    is_timed: bool = False


class StepStats:
    """Counters since the start or the last reset.

    Every step is counted once, under this rank's phase and the reason all ranks agreed on; a step that was dropped
    because the one before had failed counts under the phase it would have had. prompt_tokens: computed ones, again
    after a preemption; those taken from the prefix cache are not among them. failed: steps whose results were
    worthless, here or on another rank.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.phases = dict.fromkeys(("prefill", "decode", "mixed", "idle"), 0)
        self.reasons: dict[str, dict[str, int]] = {}
        self.forwards = 0
        self.split = 0
        self.timed = 0
        self.times = StepTimes()
        self.failed = 0
        self.ubatch_tokens: dict[str, int] = {}
        self.ubatch_sizes = Histogram(UBATCH_BOUNDS)
        self.last_split: dict[str, bool] = {}
        self.graphs: dict[str, int] = {}
        self.requests_finished: dict[str, int] = {}
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._recent: dict[str, deque[float]] = {part: deque(maxlen=WINDOW) for part in PARTS}
        self._step_us: deque[float] = deque(maxlen=WINDOW)
        self.pace = Pace()

    def count_step(self, record: StepRecord) -> None:
        """One step, also one in which nobody worked or that was dropped."""
        self.steps += 1
        self.phases[record.phase] += 1
        add(self.reasons.setdefault(record.phase, {}), record.plan.reason.label)
        self.failed += record.has_failed
        if record.ubatches:
            self._count_forward(record)
        if record.ubatches and not record.has_failed:
            times = record.times
            self.pace.step(record.phase, record.plan.num_tokens, times.comm_ns / 1e3, times.exposed_ns / 1e3)
        else:
            self.pace.interrupt()

    def _count_forward(self, record: StepRecord) -> None:
        self.forwards += 1
        add(self.graphs, record.plan.graph.label)
        self.timed += record.is_timed
        self.times.add(record.times)
        self.last_split[record.phase] = len(record.ubatches) > 1
        if len(record.ubatches) > 1:
            self.split += 1
            cut = "+".join(str(num_tokens) for num_tokens, _ in record.ubatches)
            is_listed = cut in self.ubatch_tokens or len(self.ubatch_tokens) < MOST_CUTS
            add(self.ubatch_tokens, cut if is_listed else OTHERS)
            for num_tokens, _ in record.ubatches:
                self.ubatch_sizes.add(num_tokens)
        if record.has_failed:
            return
        for part, duration in record.us.items():
            self._sums[part] += duration
            self._recent[part].append(duration)
        self._step_us.append(sum(record.us.values()))

    def count_finished(self, reason: str) -> None:
        add(self.requests_finished, reason)

    def totals(self) -> dict[str, Any]:
        """All sums as plain values of bounded size; quick enough to ask for while steps run.

        overlap.steps are all steps, overlap.forwards those in which the model ran on this rank, overlap.timed those of
        them whose transfers were timed, which all µs of them are of; last_split: whether the last one of each phase was
        split. graphs: forwards by whether they ran in a CUDA graph, or why not (GraphReason). comm: by kind, µs of
        transfers, the exposed part of them, and bytes sent. part_us: sums by part of a step.
        """
        times = self.times
        return {
            "steps": self.steps,
            "phases": dict(self.phases),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "requests_finished": dict(self.requests_finished),
            "failed": self.failed,
            "overlap": {
                "steps": self.steps,
                "forwards": self.forwards,
                "split": self.split,
                "timed": self.timed,
                "reasons": {phase: dict(reasons) for phase, reasons in self.reasons.items()},
                "comm_us": times.comm_ns / 1e3,
                "exposed_comm_us": times.exposed_ns / 1e3,
                "comm_bytes": times.comm_bytes,
                "comm": {
                    kind: {"us": one.ns / 1e3, "exposed_us": one.exposed_ns / 1e3, "bytes": one.num_bytes}
                    for kind, one in zip(KINDS, (times.dispatch, times.combine), strict=True)
                },
                "hand_over_us": times.hand_over_ns / 1e3,
                "last_split": dict(self.last_split),
                "ubatch_sizes": self.ubatch_sizes.snapshot(),
            },
            "graphs": dict(self.graphs),
            "part_us": dict(self._sums),
        }

    def snapshot(self) -> dict[str, Any]:
        """`totals`, the splits by ubatches' tokens, and times in µs: `sum` over all steps, the rest over the last
        WINDOW."""
        found = self.totals()
        found["overlap"]["ubatch_tokens"] = dict(self.ubatch_tokens)
        return found | {
            "times_us": {part: _figures(self._recent[part], self._sums[part]) for part in PARTS},
            "step_us": _figures(self._step_us, sum(self._sums.values())),
            "pace": self.pace.snapshot(),
        }


def overlap_line(overlap: Mapping[str, Any]) -> str:
    """A snapshot's "overlap" as one line: `overlap: split 8/10 steps (below_threshold 2), exposed comm …`."""
    reasons: dict[str, int] = {}
    for by_reason in overlap["reasons"].values():
        for reason, count in by_reason.items():
            add(reasons, reason, count)
    line = f"overlap: split {overlap['split']}/{overlap['steps']} steps"
    others = list_reasons({reason: n for reason, n in reasons.items() if reason != Reason.SPLIT.label})
    if others:
        line += f" ({others})"
    timed, forwards = overlap["timed"], overlap["forwards"]
    if forwards and not timed:
        return f"{line}, comm not timed"
    exposed, total = (overlap[name] / (timed or 1) / 1000 for name in ("exposed_comm_us", "comm_us"))
    which = f" of the {timed} that were timed" if timed < forwards else ""
    return f"{line}, exposed comm {exposed:.2f} of {total:.2f} ms/step{which}"


def list_reasons(reasons: Mapping[str, int]) -> str:
    """`below_threshold 96, prefix_hazard 40`, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))


def add(counts: dict[str, int], key: str, count: int = 1) -> None:
    """Count `key`."""
    counts[key] = counts.get(key, 0) + count


def _figures(recent: deque[float], total: float) -> dict[str, float]:
    if not recent:
        return {"sum": total, "median": 0.0, "p10": 0.0, "p90": 0.0}
    if len(recent) == 1:
        return {"sum": total, "median": recent[0], "p10": recent[0], "p90": recent[0]}
    tenths = statistics.quantiles(recent, n=10)
    return {"sum": total, "median": statistics.median(recent), "p10": tenths[0], "p90": tenths[8]}
