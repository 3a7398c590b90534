"""A stream whose kernels run on a part of a GPU's multiprocessors only. Wraps torch's green contexts, whose interface
is not settled; knows nothing of what runs there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from hocket.envs import DBO_GREEN_CONTEXT
from hocket.errors import BackendUnavailable

SM_STEP = 8
"""Multiprocessors come in such groups (compute capability 9): other numbers are rounded up, at others' expense."""


class GreenStream:
    """num_sms: a multiple of SM_STEP. One per process and size (`green_stream`): torch never destroys its streams.

    Raises:
        BackendUnavailable: torch or the driver has no green contexts.
    """

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self._device = device
        try:
            from torch.cuda.green_contexts import GreenContext

            # By keyword: torch 2.11 takes (num_sms, device_id), 2.13 these and others by keyword only.
            self._context = GreenContext.create(num_sms=num_sms, device_id=device.index)
            self._stream: torch.cuda.Stream = self._context.Stream()  # type: ignore[attr-defined]
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            why = f"{' '.join(str(error).split())} (unset {DBO_GREEN_CONTEXT.name} to limit kernels only)"
            raise BackendUnavailable("green context", f"of {num_sms} multiprocessors", why) from None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes it the current stream. It starts when all that the current one has been given is done, and that one
        goes on when all that was launched here is. While a graph is captured, it becomes a part of the graph."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            with suppress(RuntimeError):  # a GPU that has failed refuses this too: the first error is the one to tell
                caller.wait_stream(self._stream)
            raise
        caller.wait_stream(self._stream)


@cache
def green_stream(device: torch.device, num_sms: int) -> GreenStream:
    """The one of this process."""
    return GreenStream(device, num_sms)
