"""How long each phase of a start took, by real clocks. Knows nothing of what is done in them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROCESSES, RENDEZVOUS, WEIGHTS, KV_CACHE, GRAPHS = "processes", "rendezvous", "weights", "KV cache", "graphs"
"""A rank's phases: its process with all imports; meeting the others; the model on its device; sizing and allocating the
cache, with the steps that are run for it; capturing and comparing CUDA graphs."""
_OWN_PACE = (PROCESSES, WEIGHTS)
"""Phases in which no rank waits for another one."""


class Phases:
    """Seconds by phase, one after the other. began: when the first one did, by time.perf_counter (None: now)."""

    def __init__(self, began: float | None = None) -> None:
        self._at = time.perf_counter() if began is None else began
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """`phase` ends and the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._at
        self._at = now


def process_began() -> float:
    """When the system started this process, by time.perf_counter, to 10 ms; now where it does not tell."""
    now = time.perf_counter()
    try:
        behind_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began_s = int(behind_name[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all fields: clock ticks since boot
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return now


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """Of an LLM. began, ready: by time.perf_counter. front_s: its own part, before any rank. ranks: each rank's phases,
    in seconds, in order; of a rank that ran before those of this start alone. first_rank: the first one's number."""

    began: float
    ready: float
    front_s: float
    ranks: Sequence[Mapping[str, float]]
    first_rank: int = 0

    @property
    def total_s(self) -> float:
        return self.ready - self.began

    @property
    def slowest(self) -> int:
        """Of `ranks`, which took longest where none waits for others; what others waited is in their later phases."""
        return max(range(len(self.ranks)), key=lambda r: sum(self.ranks[r].get(phase, 0.0) for phase in _OWN_PACE))

    def seconds(self) -> dict[str, float]:
        """By phase, in order, of the slowest rank. waiting: for other hosts, until they have their ranks."""
        of_rank = self.ranks[self.slowest]
        waiting = self.total_s - self.front_s - sum(of_rank.values())
        return {"front": self.front_s, "waiting": max(waiting, 0.0), **of_rank}

    def line(self, process_began: float, now: float) -> str:
        """All of it in one line, from the process's start until `now`, when the server is there."""
        seconds = {"imports": self.began - process_began, **self.seconds(), "server": now - self.ready}
        shown = ", ".join(f"{phase} {took:.1f}" for phase, took in seconds.items())
        of = f" (of ranks the slowest, {self.first_rank + self.slowest})" if len(self.ranks) > 1 else ""
        return f"start-up {now - process_began:.1f} s: {shown}{of}"
