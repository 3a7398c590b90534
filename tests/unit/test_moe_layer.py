"""The sparse layer on one rank against transformers' blocks; layouts, the row format, registries and the factory."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from configs import MOE, PLAIN_MOE
from torch import nn
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hocket.config.backends import CPU_EXPERTS
from hocket.config.moe import MoEConfig
from hocket.dist.mesh import Mesh
from hocket.errors import BackendUnavailable, ConfigError, HocketError
from hocket.layers.mlp import GatedMLP
from hocket.moe.base import TokenLayout
from hocket.moe.factory import MoEFactory
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.local import LocalTransport
from hocket.moe.transport.registry import build_transport
from hocket.moe.transport.rows import RowFormat

CPU = torch.device("cpu")
HIDDEN, NUM_EXPERTS = 32, MOE.num_experts
MESH = Mesh(rank=0, world_size=1, device=CPU)
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": MOE.intermediate_size,
    "num_experts_per_tok": MOE.top_k,
}


def layout(num_tokens: int, num_padded: int | None = None) -> TokenLayout:
    padded = num_tokens if num_padded is None else num_padded
    return TokenLayout.of(num_tokens, padded, padded, CPU)


def make(config: MoEConfig, backend: str = "reference", shared: nn.Module | None = None) -> MoELayer:
    factory = MoEFactory(MESH, ExpertPlacement(config.num_experts, 1), "local", backend)
    layer = factory.build(config, HIDDEN, "silu", shared, CPU, torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def copy_from(layer: MoELayer, block: nn.Module) -> None:
    """Random weights into transformers' block and the same into ours."""
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer.experts.w13.copy_(block.experts.gate_up_proj)
    layer.experts.w2.copy_(block.experts.down_proj)
    layer.router.weight.copy_(block.gate.weight)
    if layer.router.e_score_correction_bias is not None:
        nn.init.normal_(block.gate.e_score_correction_bias)
        layer.router.e_score_correction_bias.copy_(block.gate.e_score_correction_bias)


@pytest.mark.parametrize("backend", CPU_EXPERTS)
@torch.no_grad()
def test_same_as_transformers(backend: str) -> None:
    torch.manual_seed(0)
    v3 = DeepseekV3MoE(DeepseekV3Config(**SHAPE, n_routed_experts=NUM_EXPERTS, n_group=4, topk_group=2))
    qwen = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**SHAPE, num_experts=NUM_EXPERTS, norm_topk_prob=True))
    x = torch.randn(1, 50, HIDDEN)
    for config, block, shared in ((MOE, v3, v3.shared_experts), (PLAIN_MOE, qwen, None)):
        layer = make(config, backend, shared)
        copy_from(layer, block)
        torch.testing.assert_close(layer(x[0], layout(50)), block(x)[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("backend", CPU_EXPERTS)
@torch.no_grad()
def test_padding_computes_nothing_and_reaches_nobody(backend: str) -> None:
    torch.manual_seed(0)
    layer = make(MOE, backend)
    x = torch.randn(7, HIDDEN)
    clean = layer(x[:5], layout(5))
    x[5:] = torch.nan
    out = layer(x, layout(5, 7))
    torch.testing.assert_close(out[:5], clean)
    assert not out[5:].any()
    assert layer(x[5:], layout(0, 2)).isfinite().all()
    assert layer(x[:0], layout(0)).shape == (0, HIDDEN)


@torch.no_grad()
def test_padding_in_the_middle() -> None:
    torch.manual_seed(0)
    layer = make(MOE)
    x = torch.randn(4, HIDDEN)
    is_padding = torch.tensor([False, True, False, False])
    mixed = TokenLayout(num_tokens=3, num_padded=4, is_padding=is_padding, num_padded_max=6)
    out = layer(x, mixed)
    torch.testing.assert_close(out[~is_padding], layer(x[~is_padding], layout(3)))
    assert not out[1].any()


@torch.no_grad()
def test_load_is_counted_for_real_tokens_when_asked() -> None:
    torch.manual_seed(0)
    layer = make(MOE)
    x = torch.randn(6, HIDDEN)
    layer(x, layout(6))
    assert layer.expert_load is None
    layer.count_expert_load()
    layer(x, layout(4, 6))
    layer(x[:1], layout(1))
    _, ids = layer.router(x)
    expected = torch.bincount(torch.cat((ids[:4], ids[:1])).flatten(), minlength=NUM_EXPERTS)
    assert layer.expert_load is not None
    assert torch.equal(layer.expert_load, expected)
    layer.count_expert_load(False)
    assert layer.expert_load is None


@torch.no_grad()
def test_ids_out_of_range() -> None:
    layer = make(MOE)
    layer.transport = LocalTransport(ExpertPlacement(2, 1))
    with pytest.raises(HocketError, match=r"expert ids must be -1 or in \[0, 2\)"):
        layer(torch.randn(20, HIDDEN), layout(20))


def test_layouts_that_make_no_sense() -> None:
    for num_tokens, num_padded, num_max in ((3, 2, 2), (1, 2, 1), (-1, 0, 0)):
        with pytest.raises(AssertionError):
            TokenLayout.of(num_tokens, num_padded, num_max, CPU)
    with pytest.raises(AssertionError, match="is_padding"):
        TokenLayout(num_tokens=1, num_padded=2, is_padding=None, num_padded_max=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "top_k"), [(1, 1), (7, 3), (192, 8)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_round_trip_bit_by_bit(hidden: int, top_k: int, dtype: torch.dtype, count: int) -> None:
    rows = RowFormat(hidden, top_k, dtype)
    x = torch.randn(count, hidden).to(dtype)
    ids = torch.randint(-1, 300, (count, top_k))
    weights = torch.rand(count, top_k)
    packed = rows.pack(x, ids, weights, count + 2)
    assert packed.shape == (count + 2, rows.row_bytes)
    assert rows.row_bytes % 16 == 0
    got_x, got_ids, got_weights = rows.unpack(packed)
    assert torch.equal(got_x[:count], x)
    assert torch.equal(got_weights[:count], weights)
    assert got_ids.dtype == torch.int32
    assert torch.equal(got_ids[:count], ids.int())
    assert (got_ids[count:] == -1).all()
    assert not got_x[count:].any()


@pytest.mark.parametrize("name", ["naive", "local", "pplx"])
def test_transports_that_are_refused(name: str) -> None:
    with pytest.raises(BackendUnavailable, match="available here: torch, allgather_reducescatter"):
        build_transport(name, ExpertPlacement(4, 2), rank=0, group=None, device=CPU)


@pytest.mark.parametrize("name", ["local", "torch", "allgather_reducescatter"])
def test_one_rank_needs_no_transport(name: str) -> None:
    transport = build_transport(name, ExpertPlacement(4, 1), rank=0, group=None, device=CPU)
    assert transport.name == "local"
    assert not transport.requires_padding


def test_the_factory_checks_what_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"placement\.num_ranks"):
        MoEFactory(MESH, ExpertPlacement(8, 2), "torch", "reference")
    with pytest.raises(ConfigError, match="num_experts"):
        MoEFactory(MESH, ExpertPlacement(9, 1), "local", "reference").build(
            MOE, HIDDEN, "silu", None, CPU, torch.float32
        )
    factory = MoEFactory(MESH, ExpertPlacement(8, 1), "local", "grouped_mm")
    layers = [factory.build(MOE, 30, "silu", None, CPU, torch.bfloat16, torch.bfloat16) for _ in range(3)]
    assert [layer.experts.name for layer in layers] == ["reference"] * 3
    assert len(caplog.messages) == 1, "a stand-in is reported once, not for each layer"
    assert layers[0].router.weight.dtype == torch.bfloat16


def test_placement_needs_no_torch() -> None:
    code = "import sys, hocket.moe.placement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


@torch.no_grad()
def test_a_call_leaves_no_cycles() -> None:
    """What only Python's collector finds would hold a layer's tensors, on a GPU too, until it runs."""
    mlp = GatedMLP(HIDDEN, 16, device=CPU, dtype=torch.float32)
    layer = make(MOE, shared=mlp)
    x, layout_of_x = torch.randn(5, HIDDEN), layout(5)
    layer(x, layout_of_x)
    gc.collect()
    gc.disable()
    try:
        layer(x, layout_of_x)
        assert gc.collect() == 0
    finally:
        gc.enable()
