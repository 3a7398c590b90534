"""Repeated launches on a GPU give what Triton's own do, and the host waits for nothing that it sends or samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.host import sent
from hocket.launch import Launch
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.worker.sampler import Sampler

GPU = torch.device("cuda")
SLEEP_CYCLES = 500_000_000


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HOCKET_KEEP_KERNELS=1."""
    monkeypatch.setattr("hocket.launch.keeps_kernels", lambda: True)


@triton.jit(do_not_specialize=["bonus"])
def _add(x, y, out, bonus, count, factor, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count) * factor + bonus
    if HAS_Y:
        value += tl.load(y + at, mask=at < count)
    tl.store(out + at, value, mask=at < count)


@pytest.mark.parametrize("has_y", [True, False])
@pytest.mark.parametrize("count", [1, 100, 1000])
def test_the_same_as_triton(has_y: bool, count: int) -> None:
    launch = Launch(_add, (triton.cdiv(count, 128),), count, 0.5, HAS_Y=has_y, BLOCK=128)
    room = torch.randn(2, count + 8, device=GPU)
    for bonus, (skip, dtype) in enumerate([(0, torch.float32), (1, torch.float32), (4, torch.bfloat16)] * 3):
        x, y = (row[skip : skip + count].to(dtype) if skip != 1 else row[1 : count + 1] for row in room)
        out = torch.full_like(x, torch.nan)
        launch(x, y if has_y else None, out, changing=(bonus,))
        expected = x.float() * 0.5 + bonus + (y.float() if has_y else 0)
        torch.testing.assert_close(
            out, expected.to(out.dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-5
        )


def is_waited_for(act: Callable[[], object]) -> bool:
    """Whether the host comes out of `act` only after what the GPU was given before."""
    act()  # modules are loaded and memory is taken the first time
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    done.record()
    act()
    waited = done.query()
    torch.cuda.synchronize()
    return waited


def test_sent_values_are_not_waited_for() -> None:
    values = list(range(1 << 16))
    assert is_waited_for(lambda: torch.tensor(values, device=GPU)), "the device is not busy for long enough"
    assert not is_waited_for(lambda: sent(values, torch.int64, GPU))
    assert sent(values, torch.int64, GPU).tolist() == values


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, min_p=0.01),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9),
    ],
)
def test_sampling_is_not_waited_for(params: SamplingParams) -> None:
    """Of some rows at random, beside greedy ones."""
    logits = torch.randn(4, 4096, device=GPU)
    greedy = SamplingParams(temperature=0.0)
    requests = [Request(EngineRequest(f"r{i}", [1, 2], params if i % 2 else greedy)) for i in range(4)]

    def act() -> Tensor:
        return Sampler().launch(logits, requests, [0, 0, 0, 0])

    assert not is_waited_for(act)
