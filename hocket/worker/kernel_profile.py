"""Gives recorded steps on a GPU the times of their kernels, by torch's profiler. Knows no engine."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hocket.trace.gpu_steps import MARK, fill
from hocket.trace.spans import Step
from hocket.worker.kernel_count import kernels_of

logger = logging.getLogger(__name__)
_MARK_CYCLES = 100_000
"""Of a mark: some 50 µs, so that the event behind it is launched while it runs."""
_SPARE_STEPS = 16


class KernelProfile:
    """One profile, of `num_steps` recorded steps and some between them; see `trace.spans.Profile`.

    The profiler keeps every kernel in memory, so it stops where steps to record do not come: those that come later are
    left with the times of events.
    """

    def __init__(self, num_steps: int) -> None:
        self.is_running = False
        self._left = 2 * num_steps + _SPARE_STEPS
        self._marked: list[Step] = []
        self._profile: Any = None

    @classmethod
    def started(cls, num_steps: int, *, is_early: bool) -> KernelProfile | None:
        """One that runs from now on, or (not is_early) is ready to: the first start takes seconds. None where the
        profiler does not run."""
        found = cls(num_steps)
        found.start()
        if not found.is_running:
            return None
        if not is_early:
            found.stop()
        return found

    def start(self) -> None:
        """From now on kernels are noted. Where the profiler cannot, a warning says why."""
        try:
            torch.cuda.synchronize()
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
            self.is_running = True
        except RuntimeError as error:
            self._profile = None
            logger.warning("traces are of events between launches, as kernels cannot be profiled: %s", error)

    def stop(self) -> None:
        """No more kernels are noted."""
        if not self.is_running:
            return
        self.is_running = False
        torch.cuda.synchronize()
        self._profile.stop()

    def passed(self, *, is_over: bool) -> None:
        if self.is_running:
            self._left -= 1
            if is_over or self._left < 0:
                self.stop()

    def mark(self, step: Step | None) -> None:
        if step is not None:
            self._marked.append(step)
        torch.cuda._sleep(_MARK_CYCLES)  # type: ignore[no-untyped-call]

    def fill(self, num_layers: int) -> None:
        """Give the steps that were marked their kernels' times. num_layers: sparse ones of the model."""
        self.stop()
        if not self._marked:
            return
        kernels = kernels_of(self._profile.events())
        if not fill(self._marked, kernels, num_layers):
            found = sum(MARK in kernel.name for kernel in kernels)
            what = f"{found} of {2 * len(self._marked)} marks among {len(kernels)} kernels"
            logger.warning("a profile has %s: traces are of events between launches", what)
