"""The executor on one rank: cuts give what the whole batch gives; a failure ends one ubatch, never a collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make
from test_views import make_inputs
from torch import Tensor, nn

from hocket.cache.storage import allocate_kv_caches, slot_bytes_of
from hocket.config.model import ModelConfig
from hocket.dist.mesh import Mesh
from hocket.errors import OverlapError, RankLost, UBatchFailed
from hocket.models.base import CausalLM, UBatchInputs
from hocket.models.loader import load_weights
from hocket.models.registry import build_model
from hocket.moe.base import TokenLayout
from hocket.moe.factory import MoEFactory
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.schedule import HAND_OVER_FIRST, LAUNCH_FIRST, Schedule
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import join, split_inputs
from hocket.ubatch.context import current
from hocket.ubatch.transfer import Transfer

CPU = torch.device("cpu")
BLOCK = 4
LENS = [5, 9, 3]


class CountingTransport(Transport):
    """Counts the transfers that ran, and can fail one on the lane as a broken collective does."""

    name = "counting"
    requires_padding = False

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.sent: Counter[str] = Counter()
        self.fail_at = -1

    def _counted(self, transfer: Transfer[Any], name: str) -> Transfer[Any]:
        def send() -> None:
            if sum(self.sent.values()) == self.fail_at:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer")
            self.sent[name] += 1
            transfer.send()

        return Transfer(send, transfer.result, transfer.num_bytes, transfer.receive)

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        return self._counted(self.inner.prepare(x, topk_ids, topk_weights, layout), "dispatch")

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        return self._counted(self.inner.finalize(expert_out, handle), "combine")


class Bench:
    """A tiny model with a counting transport."""

    def __init__(self, path: Path) -> None:
        self.config = ModelConfig.from_pretrained(path)
        factory = MoEFactory(
            Mesh(rank=0, world_size=1), ExpertPlacement(self.config.moe.num_experts, 1, "linear"), "local", "grouped_mm"
        )
        self.transport = CountingTransport(factory.transport)
        factory.transport = self.transport
        self.model: CausalLM = build_model(self.config, factory, CPU, torch.float32)
        load_weights(self.model, path)
        self.layers = [m for m in self.model.modules() if isinstance(m, MoELayer)]

    def inputs(self, n: int) -> tuple[UBatchInputs, ...]:
        whole = make_inputs([(0, count) for count in LENS])
        object.__setattr__(whole.attention, "slot_mapping", self._slots(whole))
        if n == 1:
            return (whole,)
        return split_inputs(whole, cut_batch(LENS, equal_bounds(sum(LENS), n)))

    def _slots(self, whole: UBatchInputs) -> Tensor:
        rows = torch.repeat_interleave(torch.arange(len(LENS)), torch.tensor(LENS))
        blocks = whole.attention.block_table[rows, whole.positions // BLOCK].long()
        return blocks * BLOCK + whole.positions % BLOCK

    def run(self, executor: UBatchExecutor, n: int) -> Tensor:
        cache = allocate_kv_caches(self.config, 16, BLOCK, torch.float32, CPU)
        with torch.inference_mode():
            return join(executor.run(self.inputs(n), cache, "prefill"))

    def run_captured(self, executor: UBatchExecutor, n: int) -> Tensor:
        """The same with plans of the attention that are made before."""
        cache = allocate_kv_caches(self.config, 16, BLOCK, torch.float32, CPU)
        parts, attention, slot_bytes = self.inputs(n), self.model.backends.attention, slot_bytes_of(cache[0])
        with torch.inference_mode():
            plans = [attention.plan(u.attention, len(u.token_ids), BLOCK, torch.float32, slot_bytes) for u in parts]
            return join(executor.run_captured(parts, cache, plans))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make("v2", tmp_path_factory.mktemp("checkpoints")))


@pytest.fixture(params=[(kind, n) for kind in EXECUTORS for n in (2, 3, 4)], ids=str)
def executor(request: pytest.FixtureRequest, bench: Bench) -> Iterator[tuple[UBatchExecutor, int]]:
    kind, n = request.param
    made = UBatchExecutor(bench.model, kind, n, 10.0, CPU)
    bench.transport.sent.clear()
    bench.transport.fail_at = -1
    yield made, n
    made.close()


def test_cuts_give_the_whole(bench: Bench, executor: tuple[UBatchExecutor, int]) -> None:
    run, n = executor
    whole = bench.run(run, 1)
    for count in range(2, n + 1):
        bench.transport.sent.clear()
        torch.testing.assert_close(bench.run(run, count), whole, atol=1e-5, rtol=0)
        assert set(bench.transport.sent.values()) == {count * len(bench.layers)}
    assert current() is None


class Raises(nn.Module):
    """Stands in for a module and raises in one ubatch (None: in an unsplit step too)."""

    def __init__(self, inner: nn.Module, in_ubatch: int) -> None:
        super().__init__()
        self.inner, self.in_ubatch = inner, in_ubatch

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any) -> Any:
        context = current()
        if context is not None and context.idx == self.in_ubatch:
            raise ValueError("planted")
        return self.inner(*args)


@pytest.mark.parametrize("stage", ["attention", "router", "experts", "shared_experts"])
@pytest.mark.parametrize("in_ubatch", [0, 1])
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("schedule", [LAUNCH_FIRST, HAND_OVER_FIRST], ids=["launch", "hand"])
def test_a_failure_in_any_stage_ends_one_ubatch_only(
    bench: Bench,
    executor: tuple[UBatchExecutor, int],
    stage: str,
    in_ubatch: int,
    layer: int,
    schedule: Schedule,
) -> None:
    run, n = executor
    run.schedules["prefill"] = schedule
    whole = bench.run(run, 1)
    label = {"experts": "experts", "shared_experts": "shared experts"}.get(stage, "attention or router")
    label = "qkv projection" if stage == "attention" else label
    decoder = bench.model.layers[layer]
    owner = decoder if stage == "attention" else decoder.mlp
    inner = getattr(owner, stage)
    for count in (1, n):
        if count == 1 and in_ubatch:
            continue
        bench.transport.sent.clear()
        setattr(owner, stage, Raises(inner, in_ubatch))
        try:
            with pytest.raises(
                UBatchFailed, match=rf"ubatch {in_ubatch}, sparse layer {layer - 1}, {label}: ValueError: planted"
            ):
                bench.run(run, count)
        finally:
            setattr(owner, stage, inner)
        # Every collective of the step took place, as the other ranks expect.
        assert dict(bench.transport.sent) == dict.fromkeys(("dispatch", "combine"), count * len(bench.layers))
        torch.testing.assert_close(bench.run(run, count), whole, atol=1e-5, rtol=0)


class PrepareFails(Transport):
    """A counting transport whose `prepare` or `finalize` raises in ubatch 1."""

    name = "failing"
    requires_padding = False

    def __init__(self, inner: CountingTransport, where: str) -> None:
        self.inner, self.where = inner, where

    def _maybe_fail(self, where: str) -> None:
        context = current()
        if context is not None and context.idx == 1 and self.where == where:
            raise ValueError("planted")

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        if len(x):  # not where the ubatch only takes part
            self._maybe_fail("prepare")
        self._maybe_fail("join")
        return self.inner.prepare(x, topk_ids, topk_weights, layout)

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        self._maybe_fail("finalize")
        return self.inner.finalize(expert_out, handle)


@pytest.mark.parametrize("schedule", [LAUNCH_FIRST, HAND_OVER_FIRST], ids=["launch", "hand"])
@pytest.mark.parametrize("where", ["prepare", "finalize", "join"])
def test_failures_of_a_transport_itself(
    bench: Bench, executor: tuple[UBatchExecutor, int], schedule: Schedule, where: str
) -> None:
    """Before anything was sent the ubatch goes on without tokens; after that nobody can go on."""
    run, n = executor
    run.schedules["prefill"] = schedule
    layer = bench.layers[1]
    failing = PrepareFails(bench.transport, where)
    expected = UBatchFailed if where == "prepare" else OverlapError
    layer.transport = failing
    try:
        with pytest.raises(expected, match=r"planted") as caught:
            bench.run(run, n)
        assert type(caught.value) is expected
        if where == "prepare":
            assert "ubatch 1, sparse layer 1, dispatch" in str(caught.value)
            assert dict(bench.transport.sent) == dict.fromkeys(("dispatch", "combine"), n * len(bench.layers))
    finally:
        layer.transport = bench.transport


@pytest.mark.parametrize("kind", EXECUTORS)
def test_ctrl_c_in_a_ubatch_is_passed_on(bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    run = UBatchExecutor(bench.model, kind, 2, 10.0, CPU)
    monkeypatch.setattr(bench.layers[1].experts, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.run(run, 2)
    run.close()


def test_a_broken_collective_ends_the_step_at_once(bench: Bench) -> None:
    for kind in EXECUTORS:
        for fail_at in (0, 1, 2, 5):
            run = UBatchExecutor(bench.model, kind, 2, 10.0, CPU)
            bench.transport.sent.clear()
            bench.transport.fail_at = fail_at
            with pytest.raises(RankLost, match=r"a rank is late or gone: .* failed: Connection closed by peer"):
                bench.run(run, 2)
            assert sum(bench.transport.sent.values()) == fail_at, "nothing is sent after the lane broke"
            bench.transport.fail_at = -1
            run.close()
