"""What torch keeps per OS thread, when ubatches share one. Knows nothing of whose turn it is.

Greenlets that take turns on one thread must each find grad mode, inference mode, autocast and stream as they left
them. So the thread is in its base state, that of the step's caller, whenever another ubatch goes on; a ubatch that had
changed it has its own state back afterwards. torch's guards save and restore absolute states, so those of one ubatch
may be entered and left while another is within its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import is_autocast_enabled, is_grad_enabled, is_inference_mode_enabled

from hocket.dist.record import Record
from hocket.ubatch.baton import Baton, GreenletBaton, ThreadBaton
from hocket.ubatch.lanes import InlineLane, Lane, Setup, WorkerLane
from hocket.ubatch.stream_lane import StreamLane

Switch = Callable[[], object]


class ThreadState:
    """The state of the thread that makes it: the base between ubatches."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._grad = is_grad_enabled()
        self._inference = is_inference_mode_enabled()
        self._autocast = is_autocast_enabled(device.type)
        self._autocast_dtype = torch.get_autocast_dtype(device.type)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def around(self, switch: Switch) -> None:
        """Let another ubatch run in the base state; on return the state is what it was."""
        if (
            is_grad_enabled() is self._grad
            and is_inference_mode_enabled() is self._inference
            and is_autocast_enabled(self._device_type) is self._autocast
            and self._is_on_its_stream()
        ):
            switch()
        else:
            with self._base():
                switch()

    def _is_on_its_stream(self) -> bool:
        return self._stream is None or bool(torch.cuda.current_stream(self._stream.device.index) == self._stream)

    @contextlib.contextmanager
    def _base(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if is_inference_mode_enabled() is not self._inference:
                stack.enter_context(torch.inference_mode(self._inference))
            if is_grad_enabled() is not self._grad:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            if is_autocast_enabled(self._device_type) is not self._autocast:
                stack.enter_context(torch.autocast(self._device_type, self._autocast_dtype, self._autocast))
            if self._stream is not None and not self._is_on_its_stream():
                stack.enter_context(torch.cuda.stream(self._stream))
            yield


def thread_setup(device: torch.device) -> Setup:
    """What every thread that touches tensors enters first."""

    @contextlib.contextmanager
    def setup() -> Iterator[None]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.inference_mode():
            yield

    return setup


def on_stream_of_caller(device: torch.device) -> Setup:
    """What each ubatch enters, whatever thread runs it: the stream that this caller computes on."""
    if device.type != "cuda":
        return contextlib.nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream(device))


def comm_lane(device: torch.device, timeout_s: float, record: Record | None) -> Lane:
    """The lane of split steps."""
    if device.type == "cuda":
        return StreamLane(device, record)
    return WorkerLane(timeout_s, thread_setup(device), record=record)


def inline_lane(device: torch.device, record: Record | None) -> Lane:
    """The lane of unsplit steps. On a GPU transfers only join its queue."""
    return InlineLane(record, launches=device.type == "cuda")


def make_baton(kind: str, size: int, timeout_s: float, device: torch.device) -> Baton:
    """The baton of an executor ("thread" or "greenlet"), with torch's state per thread taken care of."""
    if kind == "thread":
        return ThreadBaton(size, timeout_s, thread_setup(device))
    assert kind == "greenlet", kind
    return GreenletBaton(size, timeout_s, lambda: ThreadState(device).around)
