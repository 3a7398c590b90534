"""Overlap on one GPU: transfers on a stream of their own change no answer, and compute hides them.

Nothing is sent anywhere: between one rank and itself the collectives are copies, and the link is emulated.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import PLAIN_MOE
from torch import Tensor, nn

from hocket.dist import collectives
from hocket.dist.mesh import Mesh
from hocket.layers.mlp import GatedMLP
from hocket.moe.base import TokenLayout
from hocket.moe.factory import MoEFactory
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.allgather_reducescatter import AllGatherReduceScatterTransport
from hocket.moe.transport.base import Transport
from hocket.moe.transport.link_copies import CopyDelay
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.moe.transport.local import LocalTransport
from hocket.moe.transport.torch_a2a import TorchTransport
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.schedule import HAND_OVER_FIRST, LAUNCH_FIRST
from hocket.trace import spans
from hocket.trace.figures import step_figures
from hocket.trace.spans import COMPUTE, KERNELS, Recorder, Span, Stage
from hocket.worker.kernel_profile import KernelProfile

GPU = torch.device("cuda", 0)
NUM_LAYERS = 4
LINK_US = 500.0
"""Less than any stage of `large`'s compute takes."""
SPLIT_EVENLY = {2: (0.5, 0.5), 3: (0.2, 0.5, 0.3)}
Parts = tuple[Any, ...]


class Stack(nn.Module):
    """Sparse layers with a few products in place of attention. After each layer it writes NaN into whatever memory is
    free: a tensor that was given back before its transfer was over shows it."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, num_products: int) -> None:
        super().__init__()
        config = replace(PLAIN_MOE, intermediate_size=width)
        factory = MoEFactory(
            Mesh(rank=0, world_size=1, device=GPU), ExpertPlacement(config.num_experts, 1), "local", "auto"
        )
        self.layers = nn.ModuleList()
        for _ in range(NUM_LAYERS):
            shared = GatedMLP(hidden, 64, device=GPU, dtype=dtype)
            self.layers.append(factory.build(config, hidden, "silu", shared, GPU, dtype))
        self.product = nn.Parameter(torch.empty(hidden, hidden, device=GPU, dtype=dtype))
        self.num_products = num_products
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=hidden**-0.5)
        self.spoils = True

    def use(self, transport: Transport) -> None:
        for layer in self.layers:
            assert isinstance(layer, MoELayer)
            layer.transport = transport

    def forward(self, inputs: Any, kv_cache: list[Tensor], plan: Any = None) -> Tensor:
        x = inputs.x
        for layer in self.layers:
            spans.begin(Stage.QKV)
            h = x
            for _ in range(self.num_products):
                h = nn.functional.rms_norm(h, h.shape[1:]) @ self.product
            x = x + layer(nn.functional.rms_norm(h, h.shape[1:]), inputs.layout)
            if self.spoils:
                for rows in (len(x), 2 * len(x), 4 * len(x)):
                    x.new_full((rows, x.shape[1]), torch.nan)
        return x


def parts_of(x: Tensor, n: int) -> Parts:
    """x [T, D] whole for n = 1, else in n parts."""
    sizes = [len(x)] if n == 1 else [int(len(x) * share) for share in SPLIT_EVENLY[n]]
    assert sum(sizes) == len(x)
    return tuple(SimpleNamespace(x=p, layout=TokenLayout.of(len(p), len(p), len(p), GPU)) for p in x.split(sizes))


def run(executor: UBatchExecutor, parts: Parts) -> Tensor:
    with torch.inference_mode():
        return torch.cat(executor.run(parts, [], "prefill"))


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Collectives between one rank and itself: copies, after as many µs as the function given says."""
    wait, delay_us = CopyDelay(GPU), 0.0

    def copy(output: Tensor, input: Tensor, *_: Any) -> None:
        if delay_us:
            wait.wait(wait.start(wait.mark(), delay_us * 1e-6))
        output.copy_(input)

    def delay(us: float) -> None:
        nonlocal delay_us
        delay_us = us

    for name in ("all_to_all", "all_gather", "reduce_scatter_sum"):
        monkeypatch.setattr(collectives, name, copy)
    return delay


def transport_of(name: str) -> Transport:
    placement = ExpertPlacement(PLAIN_MOE.num_experts, 1)
    if name == "local":
        return LocalTransport(placement)
    kind = TorchTransport if name == "torch" else AllGatherReduceScatterTransport
    return kind(placement, 0, None, GPU)


@pytest.fixture(scope="module")
def small() -> Stack:
    return Stack(256, 64, torch.float32, 2)


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("name", ["local", "torch", "allgather_reducescatter"])
@pytest.mark.parametrize("link_us", [None, 100.0])
def test_split_steps_give_what_whole_ones_do(
    small: Stack, copies: Callable[[float], None], name: str, kind: str, link_us: float | None
) -> None:
    """Often, with transfers that take longer than the compute beside them and in which copies come late."""
    x = torch.randn(600, 256, device=GPU)
    small.use(transport_of("local"))
    whole = UBatchExecutor(small, kind, 1, 10.0, GPU)  # type: ignore[arg-type]
    expected = run(whole, parts_of(x, 1))
    assert expected.isfinite().all()
    transport = transport_of(name)
    small.use(transport if link_us is None else LinkEmulator(transport, link_us, 1e9, GPU))
    copies(150.0)
    for n in (2, 3):
        split = UBatchExecutor(small, kind, n, 30.0, GPU)  # type: ignore[arg-type]
        assert set(split.schedules.values()) == {HAND_OVER_FIRST if name == "torch" else LAUNCH_FIRST}
        for _ in range(10):
            torch.testing.assert_close(run(split, parts_of(x, n)), expected, atol=2e-3, rtol=2e-3)
        split.close()


def median_us(executor: UBatchExecutor, parts: Parts) -> float:
    """Of one step on the GPU, from its first kernel to its last."""
    run(executor, parts)
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run(executor, parts)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


def test_a_delay_is_as_long_as_was_asked_for() -> None:
    delay = CopyDelay(GPU)
    for seconds in (100e-6, 20e-3, 1e-3):
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            delay.wait(delay.start(delay.mark(), seconds))
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3)
        print(f"\nasked {seconds * 1e6:.0f} µs, took {min(found) * 1e6:.0f} to {max(found) * 1e6:.0f}")
        assert 0.97 * seconds <= statistics.median(found) <= 1.05 * seconds + 10e-6


@pytest.fixture(scope="module")
def large() -> Stack:
    """Of zeros: random numbers take so much power that a GPU computes faster after it has waited for a link."""
    made = Stack(4096, 2048, torch.bfloat16, 4)
    made.spoils = False
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("name", ["local", "torch"])
def test_compute_hides_transfers(large: Stack, name: str, kind: str) -> None:
    """At least 70 % of them, where each stage of compute takes longer than a transfer; without a split none."""
    x = torch.zeros(16384, 4096, device=GPU, dtype=torch.bfloat16)
    times = {}
    for link_us in (0.0, LINK_US):
        large.use(LinkEmulator(transport_of(name), link_us, 1e9, GPU))
        for n in (1, 2):
            executor = UBatchExecutor(large, kind, n, 30.0, GPU)  # type: ignore[arg-type]
            times[n, link_us] = median_us(executor, parts_of(x, n))
            executor.close()
    exposed = {n: times[n, LINK_US] - times[n, 0.0] for n in (1, 2)}
    on_link = {n: NUM_LAYERS * 2 * n * LINK_US for n in (1, 2)}
    print(f"\n{name}, {kind}: " + ", ".join(f"{n} × {us:.0f} µs: {t:.0f} µs" for (n, us), t in times.items()))
    print(f"exposed of {on_link[2]:.0f} µs: {exposed[2]:.0f}; without a split of {on_link[1]:.0f}: {exposed[1]:.0f}")
    assert times[2, 0.0] > on_link[2], "compute cannot hide so much"
    if name == "local":  # else the host's waiting for counts hides some
        assert exposed[1] >= 0.8 * on_link[1], "shared experts alone are computed beside"
    assert exposed[2] <= 0.3 * on_link[2]
    assert times[2, LINK_US] < times[1, LINK_US]


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_recorded_step_tells_what_ran_beside_what(large: Stack, kind: str) -> None:
    """By events on both streams: as much is hidden as by the times of whole steps, and next to nothing unsplit."""
    x = torch.zeros(16384, 4096, device=GPU, dtype=torch.bfloat16)
    large.use(LinkEmulator(transport_of("local"), LINK_US, 1e9, GPU))
    for n in (1, 2):
        executor = UBatchExecutor(large, kind, n, 30.0, GPU)  # type: ignore[arg-type]
        us = median_us(executor, parts_of(x, n))
        executor.recorder = Recorder()
        for _ in range(2):
            run(executor, parts_of(x, n))
        executor.close()
        (_, step) = executor.recorder.finished
        figures = step_figures([step])
        print(f"\n{kind}, {n}: step {us:.0f} µs, recorded {figures.per_step_us()}")
        assert step.start_ns > 0
        assert all(step.start_ns <= span.start_ns <= span.stop_ns <= step.stop_ns for span in step.spans)
        compute = [span for span in step.spans if span.lane == COMPUTE]
        assert figures.compute_ns == sum(span.stop_ns - span.start_ns for span in compute), "one at a time"
        assert figures.step_ns / 1e3 == pytest.approx(us, rel=0.1)
        on_link_ns = NUM_LAYERS * 2 * n * LINK_US * 1e3
        assert figures.comm_ns >= 0.95 * on_link_ns
        if n == 1:
            assert figures.hidden_share <= 0.2, "the shared experts beside a combine"
        else:
            assert figures.hidden_share >= 0.7


@pytest.mark.parametrize("n", [1, 2])
def test_kernels_lie_in_the_spans_of_events(large: Stack, n: int) -> None:
    """A profile's kernels, put on the events' clock by marks: each in the stage that it is named for, to 20 µs, and the
    lanes as full as by events, where compute leaves few gaps."""
    x = torch.zeros(16384, 4096, device=GPU, dtype=torch.bfloat16)
    large.use(LinkEmulator(transport_of("local"), LINK_US, 1e9, GPU))
    executor = UBatchExecutor(large, "greenlet", n, 30.0, GPU)  # type: ignore[arg-type]
    run(executor, parts_of(x, n))
    recorder = executor.recorder = Recorder(limit=2)
    profile = recorder.profile = KernelProfile.started(2, is_early=True)
    assert profile is not None
    for _ in range(2):
        run(executor, parts_of(x, n))
    (_, step) = recorder.finished
    events, by_events = copy.deepcopy(step.spans), step_figures([step])
    profile.fill(NUM_LAYERS)
    executor.close()
    assert step.source == KERNELS
    by_kernels = step_figures([step])
    print(f"\n{n}: by events {by_events.per_step_us()}\n   by kernels {by_kernels.per_step_us()}")
    away_us = []
    for piece in (span for span in step.spans if span.lane == COMPUTE):
        own = [s for s in events if (s.lane, s.ubatch, s.layer, s.stage) == (COMPUTE, *_place(piece))]
        away_us.append(min(max(s.start_ns - piece.start_ns, piece.stop_ns - s.stop_ns) for s in own) / 1e3)
    print(f"   {len(away_us)} kernels, at most {max(away_us):.1f} µs outside of their spans")
    assert max(away_us) < 20.0
    assert 0.85 * by_events.compute_ns <= by_kernels.compute_ns <= 1.02 * by_events.compute_ns
    assert by_kernels.comm_ns == pytest.approx(by_events.comm_ns, rel=0.1)
    assert by_kernels.hidden_share == pytest.approx(by_events.hidden_share, abs=0.1)


def _place(span: Span) -> tuple[int, int, Stage]:
    return span.ubatch, span.layer, span.stage
