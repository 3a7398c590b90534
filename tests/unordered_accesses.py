"""Finds accesses to the same bytes that nothing orders, whatever the speed of each stream, in what simulated GPUs noted
(`ordered_streams.py`). For tests only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ordered_streams import Device, Op


@dataclass(frozen=True)
class _Access:
    rank: int
    op: Op

    def __str__(self) -> str:
        owner, start, end = self.op.what
        return f"rank {self.rank}'s {self.op.stream} ({self.op.text}) {self.op.kind}s {owner}[{start}:{end}]"


class Search:
    """Lets all streams run, each as far as it can, and compares their clocks. `faults`: what nothing orders."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._queues: dict[tuple[int, str], deque[Op]] = defaultdict(deque)
        for device in devices:
            for op in device.ops:
                self._queues[device.rank, op.stream].append(op)
        self._num_ranks = len(devices)
        self._thread_of = {thread: i for i, thread in enumerate(self._queues)}
        self._clocks = {thread: np.zeros(len(self._queues), np.int64) for thread in self._queues}
        self._events: dict[int, np.ndarray] = {}
        self._raised: dict[tuple[int, int, int], np.ndarray] = {}  # signals that nobody has waited for yet
        self._lowered: dict[tuple[int, int, int], np.ndarray] = {}
        self._seen: dict[int, list[tuple[_Access, int, np.ndarray]]] = defaultdict(list)
        self.faults: list[str] = []
        while self._queues:
            if not sum([self._run(thread) for thread in list(self._queues)]):
                heads = [f"{thread}: {queue[0].kind} {queue[0].what}" for thread, queue in self._queues.items()]
                self.faults.append(f"nobody can go on: {heads}")
                break
        for accesses in self._seen.values():
            self._compare(accesses)

    def _run(self, thread: tuple[int, str]) -> int:
        """How many operations of a stream could run."""
        queue, count = self._queues[thread], 0
        while queue and self._step(thread, queue[0]):
            queue.popleft()
            count += 1
        if not queue:
            del self._queues[thread]
        return count

    def _step(self, thread: tuple[int, str], op: Op) -> bool:
        """Whether it could run, and so did."""
        rank, clock = thread[0], self._clocks[thread]
        if op.kind == "wait":
            if op.what[0] not in self._events:
                return False
            np.maximum(clock, self._events[op.what[0]], out=clock)
        elif op.kind == "signal":
            key = rank, *op.what
            if key in self._raised:
                return False
            before = self._lowered.get(key)
            if before is not None and (before > clock).any():
                self.faults.append(f"rank {rank} signals {key} again before it is known to have been waited for")
            clock[self._thread_of[thread]] += 1
            self._raised[key] = clock.copy()
            return True
        elif op.kind == "await":
            key = op.what[0], rank, op.what[1]
            if key not in self._raised:
                return False
            np.maximum(clock, self._raised.pop(key), out=clock)
            clock[self._thread_of[thread]] += 1
            self._lowered[key] = clock.copy()
            return True
        elif op.kind == "meet":
            return self._meet(op)
        clock[self._thread_of[thread]] += 1
        if op.kind == "record":
            self._events[op.what[0]] = clock.copy()
        elif op.kind in ("read", "write"):
            self._seen[op.what[0]].append((_Access(rank, op), self._thread_of[thread], clock.copy()))
        return True

    def _meet(self, op: Op) -> bool:
        there = [thread for thread, queue in self._queues.items() if queue and queue[0] == op]
        if op.what in self._events:  # the others have gone on
            return True
        if len(there) < self._num_ranks:
            return False
        latest = np.max([self._clocks[thread] for thread in there], axis=0)
        for thread in there:
            self._clocks[thread][:] = latest
        self._events[op.what] = latest  # type: ignore[index]
        return True

    def _compare(self, accesses: list[tuple[_Access, int, np.ndarray]]) -> None:
        """Find two that overlap, of which one writes, and which could have run the other way round."""
        spans = np.array([access.op.what[1:] for access, _, _ in accesses])
        writes = np.array([access.op.kind == "write" for access, _, _ in accesses])
        threads = np.array([thread for _, thread, _ in accesses])
        own = np.array([clock[thread] for _, thread, clock in accesses])
        for i, (access, _, clock) in enumerate(accesses):
            overlap = (spans[:i, 0] < spans[i, 1]) & (spans[:i, 1] > spans[i, 0]) & (writes[:i] | writes[i])
            for j in np.flatnonzero(overlap & (clock[threads[:i]] < own[:i]))[:1]:
                self.faults.append(f"{accesses[j][0]}, and nothing makes it come before {access}")
