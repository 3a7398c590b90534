"""Counts the kernels of a step with torch's profiler, which slows it: not for timing. Knows no engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from hocket.overlap.vote import StepPlan

SKIPPED, COUNTED = 2, 3
"""Steps of the wanted kind that pass first, and those that are counted after them."""
COPIES = ("Memcpy", "Memset")


class KernelCount:
    """Waits for steps of one kind, all ranks with `num_tokens` tokens each, and counts the kernels of a few."""

    def __init__(self, phase: str, num_tokens: int) -> None:
        self.phase, self.num_tokens = phase, num_tokens
        self.per_step: float | None = None
        """Kernels of a step, copies left out; None: not known (yet, or there is no GPU)."""
        self._seen = 0
        self._profile: Any = None

    def step(self, plan: StepPlan) -> None:
        """A step by `plan` has ended, and the next has not begun."""
        wanted = (plan.uniform_query > 0) == (self.phase == "decode") and set(plan.num_tokens) == {self.num_tokens}
        self._seen = self._seen + 1 if wanted else 0
        if not wanted:
            self._stop()
        elif self._seen == SKIPPED and self.per_step is None and torch.cuda.is_available():
            torch.cuda.synchronize()
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        elif self._seen == SKIPPED + COUNTED and (profile := self._stop()) is not None:
            self.per_step = _num_kernels(profile) / COUNTED

    def _stop(self) -> Any:
        profile, self._profile = self._profile, None
        if profile is not None:
            torch.cuda.synchronize()
            profile.stop()
        return profile


def _num_kernels(profile: Any) -> int:
    on_gpu = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sum(1 for event in on_gpu if not event.name.startswith(COPIES))
