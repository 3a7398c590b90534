"""Wall time of steps by kind, and kernels counted in a few of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from hocket.overlap.vote import StepPlan
from hocket.worker import pace
from hocket.worker.kernel_count import COUNTED, SKIPPED, KernelCount
from hocket.worker.pace import Pace


@dataclass
class Clock:
    """Stands for the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(pace, "time", found)
    return found


def test_a_step_counts_behind_one_of_its_kind(clock: Clock) -> None:
    steps = Pace()
    for us, phase, tokens in (
        (500, "prefill", (8, 8)),
        (70, "decode", (4, 4)),  # behind a prefill
        (10, "decode", (4, 4)),
        (30, "decode", (4, 4)),
        (90, "decode", (4, 3)),  # ranks differ
        (80, "decode", (4, 4)),
        (20, "decode", (4, 4)),
        (60, "decode", (3, 3)),
        (50, "decode", (3, 3)),
    ):
        clock.now += us / 1e6
        steps.step(phase, tokens, comm_us=1.0)
    found = steps.snapshot()
    assert found.keys() == {"decode"}
    assert {kind: (values["steps"], values["comm_us"]) for kind, values in found["decode"].items()} == {
        "4": (3, 3.0),
        "3": (1, 1.0),
    }
    assert found["decode"]["4"]["us"] == pytest.approx(60)
    assert found["decode"]["3"]["us"] == pytest.approx(50)


def test_a_rest_is_not_counted(clock: Clock) -> None:
    steps = Pace()
    steps.step("prefill", (8,), 0.0)
    steps.interrupt()
    clock.now = 1.0
    steps.step("prefill", (8,), 0.0)
    assert steps.snapshot() == {}
    clock.now = 1.5
    steps.step("prefill", (8,), 0.0)
    assert steps.snapshot() == {"prefill": {"8": {"steps": 1, "us": 500_000.0, "comm_us": 0.0, "exposed_us": 0.0}}}


@dataclass
class Plan:
    """What the counter reads of a StepPlan."""

    uniform_query: int
    num_tokens: tuple[int, ...]


DECODE, PREFILL, FEWER = Plan(1, (4, 4)), Plan(0, (4, 4)), Plan(1, (4, 3))


@dataclass
class Range:
    """µs."""

    start: float
    end: float


@dataclass
class Event:
    name: str
    device_type: Any
    time_range: Range
    device_resource_id: int = 7
    is_user_annotation: bool = False


GPU = DeviceType.CUDA
STEP_US = 1000.0


def events_of(step: int) -> list[Event]:
    """Of NCCL's 7 µs on another stream 4 lie beside the second product."""
    at = step * STEP_US
    return [
        Event("gemm", GPU, Range(at, at + 20.0)),
        Event("gemm", GPU, Range(at + 25.0, at + 55.0)),
        Event("ncclDevKernel_AllGather", GPU, Range(at + 22.0, at + 29.0), 13),
        Event("Memcpy DtoH", GPU, Range(at + 60.0, at + 69.0)),
        Event("launch", DeviceType.CPU, Range(at, at + 9.0)),
        Event("a range", GPU, Range(at, at + 99.0), is_user_annotation=True),
    ]


class Profile:
    """Stands for torch's: events in each profiled step."""

    running = 0

    def __init__(self, **_: object) -> None:
        self.num_steps = 0
        self.all.append(self)

    all: list[Profile] = []  # noqa: RUF012 (cleared by the fixture)

    def start(self) -> None:
        Profile.running += 1

    def stop(self) -> None:
        Profile.running -= 1

    def events(self) -> list[Event]:
        return [event for step in range(self.num_steps) for event in events_of(step)]


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    Profile.all.clear()
    Profile.running = 0
    return Profile.all


def take(count: KernelCount, plans: list[Plan], profiles: list[Profile]) -> None:
    for plan in plans:
        if Profile.running:
            profiles[-1].num_steps += 1
        count.step(cast(StepPlan, plan))


def test_kernels_of_a_few_steps_of_one_kind_in_a_row(profiles: list[Profile]) -> None:
    count = KernelCount("decode", 4)
    take(count, [PREFILL] * 3 + [DECODE] * (SKIPPED + COUNTED - 1) + [FEWER], profiles)
    assert count.found is None, "interrupted"
    assert Profile.running == 0
    take(count, [DECODE] * 20, profiles)
    assert count.found == {
        "per_step": 3.0,
        "us": 57.0,
        "nccl_us": 7.0,
        "comm_us": 7.0,
        "exposed_comm_us": 3.0,
        "slowest": [["gemm", 2.0, 50.0], ["ncclDevKernel_AllGather", 1.0, 7.0]],
    }
    assert [profile.num_steps for profile in profiles] == [COUNTED, COUNTED]
    assert Profile.running == 0


def test_prefills_are_the_other_kind(profiles: list[Profile]) -> None:
    count = KernelCount("prefill", 4)
    take(count, [DECODE] * 20 + [PREFILL] * 20, profiles)
    assert count.found is not None
    assert count.found["per_step"] == 3.0


def test_without_a_gpu_nothing_is_counted() -> None:
    count = KernelCount("decode", 4)
    take(count, [DECODE] * 20, [])
    assert count.found is None
