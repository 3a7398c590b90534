"""Figures from the spans of a step: how long communication took and how much of it lay under compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hocket.trace.spans import COMPUTE, Span

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CommFigures:
    """comm_ns: time in which a transfer was under way. hidden_ns: the part of it in which this rank computed."""

    comm_ns: int
    hidden_ns: int

    @property
    def exposed_ns(self) -> int:
        return self.comm_ns - self.hidden_ns


def comm_figures(spans: Iterable[Span]) -> CommFigures:
    """Of one rank's spans; the order does not matter. Time in which two transfers were under way counts once."""
    spans = list(spans)
    comm = _union((s.start_ns, s.stop_ns) for s in spans if s.part == "flight")
    compute = _union((s.start_ns, s.stop_ns) for s in spans if s.lane == COMPUTE)
    return CommFigures(comm_ns=sum(stop - start for start, stop in comm), hidden_ns=_common(comm, compute))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same time."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _common(first: list[Interval], second: list[Interval]) -> int:
    """Time that lies in both; each is disjoint and in order."""
    total = i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(stop - start, 0)
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total
