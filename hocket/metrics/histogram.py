"""Counts by size, in fixed buckets: cheap to add to, small to send. Knows nothing of what is counted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any


class Histogram:
    """bounds: upper ends of the buckets, ascending, each inside its bucket; one more bucket takes what is larger."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total: float = 0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> dict[str, Any]:
        """As plain values."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}


def cumulative(found: Mapping[str, Any]) -> list[tuple[float, int]]:
    """A snapshot as Prometheus wants it: for each bound, infinity at last, how many values lie at or below it."""
    return list(zip([*found["bounds"], math.inf], accumulate(found["counts"]), strict=True))
