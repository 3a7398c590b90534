"""Fills tensors with bytes of files: on a CPU one after the other, on a GPU by threads that read while others copy.

Knows nothing of names, formats or models. Disks and page caches give their rate only to several large reads at once,
and copies to a GPU want pinned memory: each thread has two pinned buffers and reads into one while the other is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import local

import torch
from torch import Tensor

MAX_THREADS = 8
PIECE_BYTES = 16 << 20
"""Most bytes of one read on the way to a GPU."""
CACHED_BYTES = 256 << 10
"""The same where the CPU itself converts: few enough to still lie in its cache."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """`num_bytes` of an open file from `offset` on, numbers of `dtype`."""

    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype


def read_bytes(span: Span, start: int, out: Tensor) -> None:
    """Fill `out` (uint8, contiguous, on the CPU) with the span's bytes from `start` on. Raises OSError if it ends."""
    view = out.numpy().data
    while view:
        count = os.preadv(span.file, [view], span.offset + start)
        if count == 0:
            raise OSError("the file ends too early")
        start += count
        view = view[count:]


class Filler:
    """`fill` copies a span into a tensor, `run` does many such jobs. One per load."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_gpu = device.type == "cuda"
        self.num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0))) if self._is_on_gpu else 1
        self._piece_bytes = PIECE_BYTES if self._is_on_gpu else CACHED_BYTES
        self._stages = local()

    def run(self, jobs: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Do the jobs, in this order or several at once; yields as often as there are jobs, each after one more.

        The first job that fails (by its place in the order) raises, and no further ones are begun.
        """
        if self.num_threads == 1:
            for job in jobs:
                yield job()
            return
        self._wait_for_gpu()  # what is filled may still be in use on the caller's stream
        with ThreadPoolExecutor(self.num_threads, initializer=self._begin_thread) as pool:
            futures = [pool.submit(_do, job) for job in jobs]
            try:
                for future in futures:
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)
                self._wait_for_gpu()

    def _begin_thread(self) -> None:
        if self._is_on_gpu:
            torch.cuda.set_device(self._device)

    def _wait_for_gpu(self) -> None:
        if self._is_on_gpu:
            torch.cuda.synchronize(self._device)

    def fill(self, target: Tensor, span: Span) -> None:
        """target: contiguous, of as many numbers as the span has; converted to its dtype."""
        flat = target.view(-1)
        if not self._is_on_gpu and target.dtype == span.dtype:
            read_bytes(span, 0, flat.view(torch.uint8))
            return
        size = span.dtype.itemsize
        assert flat.numel() * size == span.num_bytes, (flat.shape, span)
        step = self._piece_bytes // size * size
        for start in range(0, span.num_bytes, step):
            stop = min(start + step, span.num_bytes)
            with self._buffer() as buffer:
                read_bytes(span, start, buffer[: stop - start])
                piece = buffer[: stop - start].view(span.dtype)
                flat[start // size : stop // size].copy_(piece, non_blocking=self._is_on_gpu)

    def _buffer(self) -> AbstractContextManager[Tensor]:
        """One of this thread's, to read into and to copy from."""
        if not hasattr(self._stages, "value"):
            size = self._piece_bytes
            self._stages.value = _PinnedPair(self._device, size) if self._is_on_gpu else _Plain(size)
        stage: _PinnedPair | _Plain = self._stages.value
        return stage.next()


def _do(job: Callable[[], None]) -> None:
    """On another thread: it does not begin in the caller's inference mode, which fills tensors of either kind."""
    with torch.inference_mode():
        job()


class _Plain:
    """One buffer."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def next(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self._buffer)


class _PinnedPair:
    """Two pinned buffers of one thread, used in turns on a stream of its own."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    @contextmanager
    def next(self) -> Iterator[Tensor]:
        """The buffer that was used longer ago, when it has been copied; copies belong inside."""
        self._buffers.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        with torch.cuda.stream(self._stream):
            yield self._buffers[0]
            self._copied[0].record(self._stream)
