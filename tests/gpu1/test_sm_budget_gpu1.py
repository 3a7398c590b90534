"""Multiprocessors of split steps on a GPU: what is limited computes the same, takes as much longer as it must, and is
as it was found afterwards."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpus import missing
from torch import Tensor, nn

from hocket.errors import BackendUnavailable, UBatchFailed
from hocket.moe.base import TokenLayout
from hocket.moe.experts.triton_grouped import TritonGroupedExperts
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.green_stream import SM_STEP, GreenStream, green_stream
from hocket.overlap.sm_budget import Shares, SmBudget
from hocket.overlap.sm_limits import compute_limits

GPU = torch.device("cuda", 0)
FEW_SMS = 2 * SM_STEP
Stream = torch.cuda.Stream


def num_sms() -> int:
    return torch.cuda.get_device_properties(GPU).multi_processor_count


@pytest.fixture(scope="module")
def few() -> GreenStream:
    """A stream on a small part of the GPU."""
    try:
        return green_stream(GPU, FEW_SMS)
    except BackendUnavailable as error:
        missing(str(error))


@pytest.fixture(scope="module")
def factors() -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices, and their product."""
    torch.manual_seed(0)
    a, b = (torch.randn(4096, 4096, device=GPU).bfloat16() for _ in range(2))
    return a, b, a @ b


@pytest.fixture(autouse=True)
def _same_stream() -> Iterator[None]:
    before = torch.cuda.current_stream()
    yield
    assert torch.cuda.current_stream() == before


def median_us(work: Callable[[], object]) -> float:
    """Of one call, on the GPU."""
    found = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found[2:])


def inside(context: Any, work: Callable[[], Tensor]) -> Tensor:
    with context.entered():
        return work()


def test_a_green_stream_has_so_few(few: GreenStream, factors: tuple[Tensor, Tensor, Tensor]) -> None:
    a, b, expected = factors
    whole_us = median_us(lambda: a @ b)
    few_us = median_us(lambda: inside(few, lambda: a @ b))
    print(f"\nproduct of 4096: {whole_us:.0f} µs on {num_sms()} multiprocessors, {few_us:.0f} µs on {FEW_SMS}")
    assert few_us > 0.5 * num_sms() / FEW_SMS * whole_us
    assert median_us(lambda: a @ b) < 1.5 * whole_us, "outside it is slow too"
    for _ in range(20):  # the caller's stream goes on behind it, and it behind the caller's
        x = a * 1.0
        got = inside(few, lambda x=x: x @ b)
        torch.testing.assert_close(got + 0.0, expected, atol=0.5, rtol=0.02)
        del x, got


def test_a_green_stream_in_a_graph(few: GreenStream, factors: tuple[Tensor, Tensor, Tensor]) -> None:
    a, b, expected = factors
    given = a.clone()

    def work() -> Tensor:
        return inside(few, lambda: (given * 1.0) @ b) + 0.0

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        out = work()
    for factor in (1.0, -2.0):
        given.copy_(a * factor)
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, expected * factor, atol=1.0, rtol=0.02)
    assert median_us(graph.replay) > 0.5 * num_sms() / FEW_SMS * median_us(lambda: a @ b)


def test_a_failure_inside_leaves_the_stream(few: GreenStream, factors: tuple[Tensor, Tensor, Tensor]) -> None:
    a, b, expected = factors

    def fail() -> None:
        with few.entered():
            a @ b
            raise UBatchFailed("inside")

    with pytest.raises(UBatchFailed):
        fail()
    torch.testing.assert_close(a @ b, expected)


class Products(nn.Module):
    """Stands in for a model: experts without transport, and products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = TritonGroupedExperts(8, 1024, 512, device=GPU, dtype=torch.bfloat16)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=1024**-0.5)
        self.seen: list[tuple[int | None, Stream]] = []

    def forward(self, inputs: Any, kv_cache: list[Tensor]) -> Tensor:
        self.seen.append((self.experts.num_sms, torch.cuda.current_stream()))
        x = inputs.x
        ids = torch.arange(len(x) * 2, device=GPU).view(-1, 2) % 8
        for _ in range(4):
            x = x + self.experts(x, ids, torch.ones(ids.shape, device=GPU))
        return x


def parts_of(x: Tensor, n: int) -> tuple[Any, ...]:
    rows = len(x) // n
    return tuple(SimpleNamespace(x=p, layout=TokenLayout.of(rows, rows, rows, GPU)) for p in x.split(rows))


@pytest.mark.parametrize("kind", EXECUTORS)
def test_split_steps_run_under_it_and_give_the_same(few: GreenStream, kind: str) -> None:
    model, x = Products(), torch.randn(512, 1024, device=GPU).bfloat16()
    shares = Shares(comm_sms=num_sms() - FEW_SMS, compute_sms=FEW_SMS)
    budget = SmBudget(shares, (), compute_limits(model, num_sms()), few.entered)
    executor = UBatchExecutor(model, kind, 2, 30.0, GPU, budget=budget)  # type: ignore[arg-type]
    caller = torch.cuda.current_stream()

    def run(n: int) -> Tensor:
        with torch.inference_mode():
            return torch.cat(executor.run(parts_of(x, n), [], "prefill"))

    expected = run(1)
    for _ in range(10):
        torch.testing.assert_close(run(2), expected, atol=0.05, rtol=0.02)
    assert model.experts.num_sms is None
    assert model.seen[0] == (None, caller)
    assert {limit for limit, _ in model.seen[1:]} == {FEW_SMS}
    assert all(stream != caller for _, stream in model.seen[1:])
    executor.close()


def test_experts_take_as_much_longer_as_they_have_less() -> None:
    model, x = Products(), torch.randn(4096, 1024, device=GPU).bfloat16()
    budget = SmBudget(Shares(comm_sms=num_sms() - 4, compute_sms=4), (), compute_limits(model, num_sms()))
    inputs = parts_of(x, 1)[0]
    expected = model(inputs, [])
    whole_us = median_us(lambda: model(inputs, []))
    few_us = median_us(lambda: inside(budget, lambda: model(inputs, [])))
    print(f"\nexperts: {whole_us:.0f} µs on {num_sms()} multiprocessors, {few_us:.0f} µs on 4")
    assert few_us > 2 * whole_us, "on all of them the host may be the limit"
    torch.testing.assert_close(inside(budget, lambda: model(inputs, [])), expected, atol=0.05, rtol=0.02)
