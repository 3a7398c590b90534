"""Where each rank is, in memory that the front can read even after the rank has died. Knows nothing of what is run.

A rank writes a few integers when it passes the step exchange and around each transfer; nobody waits for them. Besides,
a thread of its own says now and then that the process runs, whatever the rank is doing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_STEP = struct.Struct("=qq")  # steps, state
_TRANSFER = struct.Struct("=qq32s")  # transfers, whether one is under way, its name
_BEAT = struct.Struct("=q")  # when the process last ran (time.monotonic_ns, one clock for all processes of a host)
_BEAT_AT = _STEP.size + _TRANSFER.size
RECORD_BYTES = _BEAT_AT + _BEAT.size
RESTS, IN_EXCHANGE, COMPUTES, CLOSES = range(4)
_STATES = ("between steps", "in the step exchange", "computing", "giving back what its transfers took")


class Record:
    """One rank's own record. `memory`: RECORD_BYTES that others can read; without it nobody can.

    steps: exchanges passed. transfers: begun, on whatever thread (one at a time). Both since the engine was built.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._memory = memoryview(bytearray(RECORD_BYTES)) if memory is None else memory
        self.restart()

    def restart(self) -> None:
        """A new engine counts from zero."""
        self.steps = self.transfers = 0
        self.is_busy = False
        self.enter(RESTS)
        _TRANSFER.pack_into(self._memory, _STEP.size, 0, 0, b"")
        self.beat()

    def beat(self) -> None:
        """The process runs. May be called on any thread."""
        _BEAT.pack_into(self._memory, _BEAT_AT, time.monotonic_ns())

    def enter(self, state: int) -> None:
        """What the rank does now: RESTS, IN_EXCHANGE, COMPUTES, which begins a step, or CLOSES."""
        self.steps += state == COMPUTES
        self.state = state
        _STEP.pack_into(self._memory, 0, self.steps, state)

    def begin_transfer(self, name: str) -> None:
        self.transfers += 1
        self.is_busy = True
        _TRANSFER.pack_into(self._memory, _STEP.size, self.transfers, 1, name.encode())

    def end_transfer(self) -> None:
        self.is_busy = False
        struct.pack_into("=q", self._memory, _STEP.size + 8, 0)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A record as somebody else sees it. silent_s: how long the process has not run, as far as is known."""

    steps: int
    state: int
    transfers: int
    is_busy: bool
    name: str
    silent_s: float = 0.0

    def __str__(self) -> str:
        doing = f"in transfer {self.transfers} ({self.name})" if self.is_busy else f"after transfer {self.transfers}"
        return f"step {self.steps}, {doing}, {_STATES[self.state]}"


class Records:
    """The records of all ranks in one file of `folder`: made by the front, written by the ranks of its host."""

    FILE = "records"

    def __init__(self, folder: str | os.PathLike[str], num_ranks: int, *, create: bool) -> None:
        path = Path(folder) / self.FILE
        if create:
            path.write_bytes(bytes(RECORD_BYTES * num_ranks))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), RECORD_BYTES * num_ranks)
        self.num_ranks = num_ranks

    def own(self, rank: int) -> Record:
        """The record that this process, `rank`, writes."""
        return Record(memoryview(self._memory)[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES])

    def read(self) -> dict[int, Whereabouts]:
        """Of each rank that has taken a step with its present engine."""
        found = {}
        for rank in range(self.num_ranks):
            steps, state = _STEP.unpack_from(self._memory, rank * RECORD_BYTES)
            transfers, busy, name = _TRANSFER.unpack_from(self._memory, rank * RECORD_BYTES + _STEP.size)
            (beat_ns,) = _BEAT.unpack_from(self._memory, rank * RECORD_BYTES + _BEAT_AT)
            if steps:
                silent_s = (time.monotonic_ns() - beat_ns) / 1e9
                found[rank] = Whereabouts(steps, state, transfers, bool(busy), name.rstrip(b"\0").decode(), silent_s)
        return found

    def close(self) -> None:
        self._memory.close()


def described(found: dict[int, Whereabouts]) -> str:
    """One line: where each rank is."""
    return "; ".join(f"rank {rank}: {where}" for rank, where in sorted(found.items()))


def behind(found: dict[int, Whereabouts]) -> set[int]:
    """Ranks that have begun fewer transfers than another, which waits for them."""
    most = max((where.transfers for where in found.values()), default=0)
    return {rank for rank, where in found.items() if where.transfers < most}


def lifeless(found: dict[int, Whereabouts], limit_s: float) -> set[int]:
    """Ranks whose process has not run for `limit_s` seconds: stopped, or held by something that lets no thread run."""
    return {rank for rank, where in found.items() if where.silent_s > limit_s}


def apart(found: dict[int, Whereabouts]) -> set[int]:
    """Ranks out of step with most: their messages are taken for others. All that may be, where no side has more."""
    groups = {frozenset(rank for rank, where in found.items() if _in_step(one, where)) for one in found.values()}
    most = max(map(len, groups), default=0)
    return set().union(*(found.keys() - group for group in groups if len(group) == most))


def elsewhere(found: dict[int, Whereabouts], rank: int) -> set[int]:
    """Where `rank` got a message it did not wait for, those that may be out of step: the fewer in one transfer."""
    here = {other for other, where in found.items() if rank in found and where.transfers == found[rank].transfers}
    others = found.keys() - here if here else set()
    if not others:
        return set()
    return here if len(here) < len(others) else others | {rank}


def _in_step(one: Whereabouts, other: Whereabouts) -> bool:
    """Every transfer needs all ranks, so they are at the same one or at two that follow each other."""
    distance = abs(one.transfers - other.transfers)
    return distance <= 1 and (one.name == other.name) == (distance == 0)
