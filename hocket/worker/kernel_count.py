"""Counts and times the kernels of a step with torch's profiler, which slows the host. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from hocket.overlap.vote import StepPlan
from hocket.trace.gpu_intervals import Kernel, gpu_figures

SKIPPED, COUNTED = 2, 3
"""Steps of the wanted kind that pass first, and those that are counted after them."""
NUM_NAMED = 16
NAME_LENGTH = 80


class KernelCount:
    """Waits for steps of one kind, all ranks with `num_tokens` tokens each, and counts the kernels of a few.

    found: see `figures`; None: not known (yet, or there is no GPU).
    """

    def __init__(self, phase: str, num_tokens: int) -> None:
        self.phase, self.num_tokens = phase, num_tokens
        self.found: dict[str, Any] | None = None
        self._seen = 0
        self._profile: Any = None

    def step(self, plan: StepPlan) -> None:
        """A step by `plan` has been launched, and the next has not begun."""
        wanted = (plan.uniform_query > 0) == (self.phase == "decode") and set(plan.num_tokens) == {self.num_tokens}
        self._seen = self._seen + 1 if wanted else 0
        if not wanted:
            self._stop()
        elif self._seen == SKIPPED and self.found is None and torch.cuda.is_available():
            torch.cuda.synchronize()
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        elif self._seen == SKIPPED + COUNTED and (profile := self._stop()) is not None:
            self.found = figures(profile.events(), COUNTED)

    def _stop(self) -> Any:
        profile, self._profile = self._profile, None
        if profile is not None:
            torch.cuda.synchronize()
            profile.stop()
        return profile


def figures(events: Iterable[Any], num_steps: int) -> dict[str, Any]:
    """Of a step: number of kernels, the sum of their µs, the part of it in NCCL's (waiting for other ranks included),
    and [name, number, µs] of those that take most. Copies are left out.

    comm_us, exposed_comm_us: how long communication ran, and how long without compute beside it, copies included
    (`trace/gpu_intervals.py`).
    """
    kernels = kernels_of(events)
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        if not kernel.is_copy:
            by_name.setdefault(kernel.name, []).append((kernel.stop_ns - kernel.start_ns) / 1e3)
    lanes = gpu_figures(kernels)
    sums = {name: (len(us) / num_steps, sum(us) / num_steps) for name, us in by_name.items()}
    slowest = sorted(sums, key=lambda name: -sums[name][1])[:NUM_NAMED]
    return {
        "per_step": sum(count for count, _ in sums.values()),
        "us": sum(us for _, us in sums.values()),
        "nccl_us": sum(us for name, (_, us) in sums.items() if "nccl" in name.lower()),
        "comm_us": lanes.comm_ns / 1e3 / num_steps,
        "exposed_comm_us": lanes.exposed_ns / 1e3 / num_steps,
        "slowest": [[name[:NAME_LENGTH], *sums[name]] for name in slowest],
    }


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """The kernels and copies among a profile's events, which have times in µs."""
    return [
        Kernel(
            event.name,
            event.device_resource_id,
            round(event.time_range.start * 1e3),
            round(event.time_range.end * 1e3),
        )
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
