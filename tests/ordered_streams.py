"""Streams of simulated GPUs that only note what was launched on them, for `unordered_accesses.py`. For tests only.

What is launched runs on the host at once, with whatever the memory holds: only who reads and writes what is looked at.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.moe.side import Side
from hocket.ubatch.lanes import Lane, Pending, Work

COMPUTE, COMM, LINK, SIDE = "compute", "comm", "link", "side"
T = TypeVar("T")
WHOLE = 0, 1
_numbers = itertools.count()


@dataclass(frozen=True)
class Op:
    """kind: read, write (of bytes [start, end) of a rank's memory, or of a tensor, numbered below 0); record, wait (for
    an event); signal, await (a rank, on a channel); meet (all ranks' streams). stream: on which it is."""

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
        self.live: dict[int, tuple[StorageWeakRef, int, str]] = {}  # of tensors: their number, and whose memory it was
        self.dropped: dict[str, list[int]] = defaultdict(list)  # by stream

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


class NotedSide(Side):
    """As `SideStream`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def begin(self, compute: Callable[[], T]) -> Callable[[], T]:
        device, begin = self._device, self._device.mark()
        with device.on(SIDE):
            device.note("wait", begin)
            result = compute()
            end = device.mark()

        def wait() -> T:
            device.note("wait", end)
            return result

        return wait


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
    """Notes what operators read and write: of the memories, and of tensors. The memory of one that was dropped is what
    the next one is made in on the same stream, as an allocator gives it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._owner = {x.untyped_storage()._cdata: rank for rank, x in device.memories.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._drop()
        is_written = {x.name: x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments}
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.arguments)
        given = [*zip(is_written, args, strict=False), *kwargs.items()]
        for name, value in () if is_view else given:
            for x in _tensors(value):
                self._note(x, is_write=is_written[name])
        made = func(*args, **kwargs)
        for x in () if is_view or any(is_written.values()) else _tensors(made):
            self._note(x, is_write=True)
        return made

    def _drop(self) -> None:
        live = self._device.live
        for key in [key for key, (storage, _, _) in live.items() if storage.expired()]:
            _, number, stream = live.pop(key)
            self._device.dropped[stream].append(number)

    def _made(self, storage: torch.UntypedStorage) -> int:
        device = self._device
        doing, device.doing = device.doing, "in memory that was dropped"
        while device.dropped[device.stream]:
            device.note("write", device.dropped[device.stream].pop(), *WHOLE)
        device.doing = doing
        number = -1 - next(_numbers)
        device.live[storage._cdata] = StorageWeakRef(storage), number, device.stream
        return number

    def _note(self, x: Tensor, *, is_write: bool) -> None:
        if x.numel() == 0:
            return
        kind, storage = "write" if is_write else "read", x.untyped_storage()
        if storage._cdata not in self._owner:
            known = self._device.live.get(storage._cdata)
            self._device.note(kind, self._made(storage) if known is None else known[1], *WHOLE)
            return
        start = x.storage_offset() * x.itemsize
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        self._device.note(kind, self._owner[storage._cdata], start, start + extent * x.itemsize)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, list | tuple) else (value,)) if isinstance(x, Tensor)]
