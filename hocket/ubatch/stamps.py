"""Times on the streams of a GPU for the spans of one step: noted as events, known when the step is over.

Events that keep times are made only for steps that are recorded. Where their kernels are profiled too, marks among them
say where a step lies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hocket.trace.spans import EVENTS, HandOver, Profile, Recorder, Span, Step


class Stamps:
    """Waits for the device, so that its clock and the host's are read together: spans are right to some 20 µs against
    those of other ranks, and to a microsecond among each other. profile: of the kernels, if there is one."""

    def __init__(self, device: torch.device, profile: Profile | None = None) -> None:
        self._device = device
        self._profile = profile if profile is not None and profile.is_running else None
        self._events: list[torch.cuda.Event] = []
        torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        self._base = _timed_event()
        self._base.synchronize()
        self._base_ns = (before + time.perf_counter_ns()) // 2

    def begin(self, step: Step) -> None:
        """`step` begins on the current stream: at once behind its mark, which lasts until this is launched."""
        step.source = EVENTS
        if self._profile is not None:
            self._profile.mark(step)
        step.start_ns = self.now()

    def end(self, step: Step) -> None:
        """All of `step` has been launched."""
        step.stop_ns = self.now()
        if self._profile is not None:
            self._profile.mark(None)

    def now(self) -> int:
        """What stands for the time at which the current stream comes here, until `resolve`: −1, −2, …"""
        self._events.append(_timed_event())
        return -len(self._events)

    def resolve(self, step: Step) -> None:
        """Wait for the device, and put ns of the host's clock for what stands for times in `step`."""
        torch.cuda.synchronize(self._device)
        times = [self._base_ns + round(self._base.elapsed_time(event) * 1e6) for event in self._events]
        everything: list[Step | Span | HandOver] = [step, *step.spans, *step.hand_overs]
        for timed in everything:
            timed.start_ns, timed.stop_ns = (times[-ns - 1] if ns < 0 else ns for ns in (timed.start_ns, timed.stop_ns))


@contextmanager
def record_replay(recorder: Recorder, device: torch.device, num_ubatches: int, num_tokens: int) -> Iterator[None]:
    """Record what is replayed inside, a decode, where a profile runs: of a graph nothing but its kernels is known."""
    profile = recorder.profile
    step = None if profile is None or not profile.is_running else recorder.begin("decode", num_ubatches, num_tokens)
    if step is None:
        yield
        return
    stamps = Stamps(device, profile)
    stamps.begin(step)
    yield
    stamps.end(step)
    stamps.resolve(step)


def _timed_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
