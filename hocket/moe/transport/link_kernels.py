"""A clock on a GPU: kernels of one program that note its time, and wait until some time after. Know no transfers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from hocket.launch import Launch


class DeviceClock:
    """Both calls only launch a kernel on the current stream. In between the stream does what is to be stretched; the
    next `begin` must be launched after the wait for the one before, on the same stream or on one that waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._began = torch.zeros(1, dtype=torch.int64, device=device)
        self._note_time = Launch(_note_time, (1,), num_warps=1)
        self._wait_since = Launch(_wait_since, (1,), num_warps=1)

    def begin(self) -> None:
        """Time begins when the stream comes here."""
        self._note_time(self._began)

    def wait_since(self, seconds: float) -> None:
        """The stream goes on `seconds` after the last `begin`, at once if that is over."""
        self._wait_since(self._began, changing=(round(seconds * 1e9),))


@triton.jit
def _note_time(began):
    tl.store(began, globaltimer())


@triton.jit(do_not_specialize=["num_ns"])
def _wait_since(began, num_ns: tl.int64):
    """num_ns: nanoseconds, as the GPU's global timer counts (it ticks about once a microsecond)."""
    start = tl.load(began)
    now = globaltimer()
    while now - start < num_ns:
        now = globaltimer()
