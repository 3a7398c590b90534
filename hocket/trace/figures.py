"""Figures from the spans of steps: communication and how much of it lay under compute, stalls, hand-overs, the bound.

All of it is about the lanes of one rank; knows no tensors, no engine, no pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.trace.spans import COMPUTE, Span, Step

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of one rank, summed over `num_steps` steps.

    comm_ns: time in which a transfer was under way; two at a time count once. hidden_ns: the part of it in which this
    rank computed. step_ns: the model's forward pass. compute_ns: time in which a ubatch computed. hand_over_ns: from
    the end of one ubatch's work to the start of the next one's, `num_hand_overs` times; a transfer may be under way
    meanwhile, so part of it can be exposed communication too.
    """

    comm_ns: int
    hidden_ns: int
    num_steps: int
    step_ns: int
    compute_ns: int
    hand_over_ns: int
    num_hand_overs: int
    bound_ns: int
    """Σ over the steps of max(compute, communication): what they would take if the shorter lane were hidden wholly."""

    @property
    def exposed_ns(self) -> int:
        return self.comm_ns - self.hidden_ns

    @property
    def hidden_share(self) -> float:
        """hidden / communication, 1 where there is none."""
        return self.hidden_ns / self.comm_ns if self.comm_ns else 1.0

    @property
    def stall_ns(self) -> int:
        """Time of the steps in which the rank did not compute."""
        return self.step_ns - self.compute_ns

    @property
    def over_bound(self) -> float:
        """What the steps took, over the bound: 1 is perfect."""
        return self.step_ns / self.bound_ns if self.bound_ns else 1.0

    def per_step_us(self) -> dict[str, float]:
        """Mean of a step in µs, by name."""
        names = ("step", "compute", "stall", "comm", "hidden", "exposed", "hand_over", "bound")
        return {name: getattr(self, f"{name}_ns") / 1e3 / max(self.num_steps, 1) for name in names}


def step_figures(steps: Sequence[Step]) -> StepFigures:
    """Of one rank's steps together."""
    comm_ns = hidden_ns = compute_ns = bound_ns = 0
    for step in steps:
        comm, compute = lanes(step.spans)
        comm_ns += length(comm)
        compute_ns += length(compute)
        hidden_ns += length(common(comm, compute))
        bound_ns += max(length(comm), length(compute))
    hand_overs = [one for step in steps for one in step.hand_overs]
    return StepFigures(
        comm_ns=comm_ns,
        hidden_ns=hidden_ns,
        num_steps=len(steps),
        step_ns=sum(step.stop_ns - step.start_ns for step in steps),
        compute_ns=compute_ns,
        hand_over_ns=sum(one.stop_ns - one.start_ns for one in hand_overs),
        num_hand_overs=len(hand_overs),
        bound_ns=bound_ns,
    )


def exposed(spans: Iterable[Span]) -> list[Interval]:
    """When a transfer was under way and nothing was computed, in order."""
    comm, compute = lanes(spans)
    found: list[Interval] = []
    for start, stop in comm:
        for busy_from, busy_until in common([(start, stop)], compute):
            if busy_from > start:
                found.append((start, busy_from))
            start = busy_until
        if stop > start:
            found.append((start, stop))
    return found


def lanes(spans: Iterable[Span]) -> tuple[list[Interval], list[Interval]]:
    """When transfers were under way, and when there was compute: each disjoint and in order."""
    spans = list(spans)
    comm = union((s.start_ns, s.stop_ns) for s in spans if s.part == "flight")
    return comm, union((s.start_ns, s.stop_ns) for s in spans if s.lane == COMPUTE)


def length(intervals: Iterable[Interval]) -> int:
    """Of all of them together; where they are disjoint that is the time in which there is one."""
    return sum(stop - start for start, stop in intervals)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same time."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What lies in both, in order; each is disjoint and in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if stop > start:
            found.append((start, stop))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found
