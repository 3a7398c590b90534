"""Streams of simulated GPUs that only note what was launched on them, and a search for accesses to the same bytes that
nothing orders, whatever the speed of each stream. Knows no transport. For tests only.

What is launched runs on the host at once, with whatever the memory holds: only who reads and writes what is looked at.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.ubatch.lanes import Lane, Pending, Work

COMPUTE, COMM, LINK = "compute", "comm", "link"
_numbers = itertools.count()


@dataclass(frozen=True)
class Op:
    """kind: read, write (of bytes [start, end) of a rank's memory); record, wait (for an event); signal, await (a rank,
    on a channel); meet (all ranks' streams). stream: on which it is."""

    kind: str
    stream: str
    what: tuple[int, ...]
    text: str = ""


class Device:
    """One rank's streams, and the memory that others write to too. `ops`: what was launched, in the host's order."""

    def __init__(self, rank: int, memories: dict[int, Tensor]) -> None:
        self.rank, self.memories = rank, memories
        self.stream = COMPUTE
        self.ops: list[Op] = []
        self.doing = ""

    def note(self, kind: str, *what: int) -> None:
        self.ops.append(Op(kind, self.stream, what, self.doing))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def mark(self) -> int:
        event = next(_numbers)
        self.note("record", event)
        return event

    def captured(self, work: Callable[[], object]) -> list[Op]:
        """What `work` launches, which is not done now. Fails where CUDA would not capture it."""
        before, self.ops = self.ops, []
        try:
            work()
            check_capture(self.ops)
            return self.ops
        finally:
            self.ops = before

    def replay(self, graph: Sequence[Op]) -> None:
        """As a graph does it: its branches wait for nothing but what was captured, and end before what comes next."""
        number = next(_numbers)
        events: dict[int, int] = defaultdict(lambda: next(_numbers))
        for op in graph:
            stream = op.stream if op.stream == COMPUTE else f"{op.stream} of graph {number}"
            what = (events[op.what[0]],) if op.kind in ("record", "wait") else op.what
            self.ops.append(replace(op, stream=stream, what=what))
        for stream in sorted({op.stream for op in graph} - {COMPUTE}):
            with self.on(f"{stream} of graph {number}"):
                end = self.mark()
            self.note("wait", end)

    def lane(self) -> Lane:
        return NotedLane(self)


def check_capture(ops: Sequence[Op]) -> None:
    """Other streams begin behind what is captured, wait for nothing else, and are waited for at the end."""
    known: dict[str, Counter[str]] = defaultdict(Counter)  # of each stream, how much it knows of each
    events: dict[int, Counter[str]] = {}
    for op in ops:
        own = known[op.stream]
        if op.kind == "wait":
            assert op.what[0] in events, f"{op.stream} waits for what is not captured ({op.text})"
            own |= events[op.what[0]]
        else:
            assert own or op.stream == COMPUTE, f"{op.stream} begins without waiting for the capture ({op.text})"
            own[op.stream] += 1
        if op.kind == "record":
            events[op.what[0]] = own.copy()
    for stream, own in known.items():
        assert known[COMPUTE][stream] == own[stream], f"nobody waits for the end of {stream}"


class NotedDelay:
    """As `link_copies.CopyDelay`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self) -> int:
        return self._device.mark()

    def start(self, mark: int, seconds: float) -> int:
        with self._device.on(LINK):
            self._device.note("wait", mark)
            return self._device.mark()

    def wait(self, end: int) -> None:
        self._device.note("wait", end)


class NotedLane(Lane):
    """As `StreamLane`."""

    has_own_thread = False
    knows_times = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self) -> int:
        return self._device.mark()

    def launch(self, work: Work, name: str, after: Any = None) -> Pending:
        with self._device.on(COMM):
            if after is not None:
                self._device.note("wait", after)
            self._device.doing = name
            work()
            self._device.doing = ""
            return Noted(self._device, self._device.mark())

    def close(self) -> None:
        return None


class Noted(Pending):
    def __init__(self, device: Device, done: int) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        self._device.note("wait", self._done)


class Accesses(TorchDispatchMode):
    """Notes what operators read and write of the memories."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._owner = {x.untyped_storage().data_ptr(): rank for rank, x in device.memories.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aliases = [argument.alias_info for argument in func._schema.arguments]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view:
            given = [*zip(aliases, args, strict=False)]
            by_name = {argument.name: argument.alias_info for argument in func._schema.arguments}
            given += [(by_name[name], value) for name, value in kwargs.items()]
            for alias, value in given:
                for x in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(x, Tensor):
                        self._note(x, is_write=alias is not None and alias.is_write)
        return func(*args, **kwargs)

    def _note(self, x: Tensor, *, is_write: bool) -> None:
        owner = self._owner.get(x.untyped_storage().data_ptr())
        if owner is None or x.numel() == 0:
            return
        start = x.storage_offset() * x.itemsize
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        self._device.note("write" if is_write else "read", owner, start, start + extent * x.itemsize)


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
