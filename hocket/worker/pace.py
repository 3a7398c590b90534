"""How long steps take that follow others of their kind: wall time of the loop, nothing left out. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class _Sums:
    """Over the steps of one kind. us: from the end of the step before to the end of this one."""

    steps: int = 0
    us: float = 0.0
    comm_us: float = 0.0
    exposed_us: float = 0.0


class Pace:
    """Steps by phase and tokens, only those in which every rank had the same number of tokens.

    A step counts if the one before was of its kind too: then the time between their ends is what one such step costs,
    whatever runs beside it and whoever waits for whom. There are as many kinds as there can be tokens in a step.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], _Sums] = {}
        self._last: tuple[str, int] | None = None
        self._last_end = 0.0

    def step(self, phase: str, num_tokens: Sequence[int], comm_us: float, exposed_us: float = 0.0) -> None:
        """A step has ended just now. phase: of this rank's batch; num_tokens: of each rank; comm_us: of transfers;
        exposed_us: the part of it that compute stood still for."""
        now = time.perf_counter()
        kind = (phase, num_tokens[0]) if min(num_tokens) == max(num_tokens) else None
        if kind is not None and kind == self._last:
            sums = self._kinds.setdefault(kind, _Sums())
            sums.steps += 1
            sums.us += (now - self._last_end) * 1e6
            sums.comm_us += comm_us
            sums.exposed_us += exposed_us
        self._last, self._last_end = kind, now

    def interrupt(self) -> None:
        """Whatever comes next does not follow at once: a step without work, or none."""
        self._last = None

    def snapshot(self) -> dict[str, dict[str, dict[str, Any]]]:
        """{phase: {tokens of each rank: {"steps", "us", "comm_us", "exposed_us"}}}, sums over the steps."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for (phase, num_tokens), sums in self._kinds.items():
            found.setdefault(phase, {})[str(num_tokens)] = asdict(sums)
        return found
