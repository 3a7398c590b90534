"""Faults to plant in a running engine, each of a kind that real systems have had. For tests only.

A plant changes one engine and nothing else. `install` makes a rank process plant, in each engine it builds, the fault
that the file FAULT_FILE names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.engine import Engine
from hocket.layers.mlp import GatedMLP
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import RotaryEmbedding
from hocket.models.base import CausalLM, DecoderLayer
from hocket.models.deepseek import LatentAttention
from hocket.models.qwen3_moe import NormedHeadsAttention
from hocket.moe.layer import MoELayer
from hocket.moe.transport.base import Dispatched, Handle
from hocket.ubatch.transfer import Transfer

FAULT_FILE = "FAULT_FILE"
LAYER = 2
Plant = Callable[[Engine], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A plant, the checkpoint it shows in, and options it needs."""

    model: str
    plant: Plant
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def model_of(engine: Engine) -> CausalLM:
    return engine.runner.model


def layer_of(engine: Engine, index: int = LAYER) -> DecoderLayer:
    layer = model_of(engine).layers[index]
    assert isinstance(layer, DecoderLayer)
    return layer


def moe_layers(engine: Engine) -> list[MoELayer]:
    return [module for module in model_of(engine).modules() if isinstance(module, MoELayer)]


def moe_of(engine: Engine) -> MoELayer:
    mlp = layer_of(engine).mlp
    assert isinstance(mlp, MoELayer)
    return mlp


def latent_of(engine: Engine) -> LatentAttention:
    attention = layer_of(engine).attention
    assert isinstance(attention, LatentAttention)
    return attention


def swap(a: Tensor, b: Tensor) -> None:
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def swap_halves(x: Tensor, dim: int) -> None:
    x.copy_(x.roll(x.shape[dim] // 2, dim))


# -- experts --------------------------------------------------------------------------------------------------------


def lose_expert(engine: Engine, moe_layer: int, expert: int) -> None:
    """One expert's output is zero (on the rank that holds all)."""
    moe_layers(engine)[moe_layer].experts.w2[expert] = 0


def swap_experts(engine: Engine) -> None:
    """Two experts answer to each other's ids."""
    experts = moe_of(engine).experts
    swap(experts.w13[3], experts.w13[4])
    swap(experts.w2[3], experts.w2[4])


def swap_gate_and_up(engine: Engine) -> None:
    swap_halves(moe_of(engine).experts.w13, 1)


def swap_gate_and_up_of_shared(engine: Engine) -> None:
    shared = moe_of(engine).shared_experts
    assert isinstance(shared, GatedMLP)
    swap_halves(shared.gate_up.weight, 0)


def swap_gate_and_up_of_dense(engine: Engine) -> None:
    mlp = layer_of(engine, 0).mlp
    assert isinstance(mlp, GatedMLP)
    swap_halves(mlp.gate_up.weight, 0)


def drop_shared_experts(engine: Engine) -> None:
    moe_of(engine).shared_experts = None


# -- routing --------------------------------------------------------------------------------------------------------


def reroute(**changes: Any) -> Plant:
    """Routers with other settings."""

    def plant(engine: Engine) -> None:
        for layer in moe_layers(engine):
            layer.router.config = dataclasses.replace(layer.router.config, **changes)

    return plant


def ignore_correction_bias(engine: Engine) -> None:
    bias = moe_of(engine).router.e_score_correction_bias
    assert bias is not None
    bias.zero_()


def weigh_with_correction_bias(engine: Engine) -> None:
    """The bias, which may only change the choice, gets into the weights as well."""
    router = moe_of(engine).router
    choose = router.forward

    def forward(x: Tensor, is_padding: Tensor | None) -> tuple[Tensor, Tensor]:
        _, ids = choose(x, is_padding)
        scores = F.linear(x.to(router.weight.dtype), router.weight).float().sigmoid() + router.e_score_correction_bias
        weights = scores.gather(-1, ids.clamp(min=0))
        return weights / weights.sum(-1, keepdim=True) * router.config.routed_scaling_factor, ids

    router.forward = forward  # type: ignore[method-assign]


# -- norms and rotary -----------------------------------------------------------------------------------------------


def swap_layer_norms(engine: Engine) -> None:
    layer = layer_of(engine)
    swap(layer.input_norm.weight, layer.post_attention_norm.weight)


def swap_latent_norms(engine: Engine) -> None:
    attention = latent_of(engine)
    assert isinstance(attention.q_a_norm, RMSNorm)
    swap(attention.q_a_norm.weight, attention.kv_a_norm.weight)


def swap_head_norms(engine: Engine) -> None:
    attention = layer_of(engine).attention
    assert isinstance(attention, NormedHeadsAttention)
    swap(attention.q_norm.weight, attention.k_norm.weight)


def rerope(**changes: Any) -> Plant:
    """Rotary tables of other settings."""

    def plant(engine: Engine) -> None:
        rope = dataclasses.replace(model_of(engine).config.rope, **changes)
        model_of(engine).rotary = RotaryEmbedding(rope, engine.mesh.device)

    return plant


def drop_softmax_mscale(engine: Engine) -> None:
    for layer in model_of(engine).layers:
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.attention, LatentAttention)
        layer.attention.scale = layer.attention.mla.qk_head_dim**-0.5


# -- prefix cache ---------------------------------------------------------------------------------------------------


def read_the_block_before(engine: Engine) -> None:
    """Each cached block but the first is the one before it. (The right blocks in another order are no fault: rows of
    the cache know their positions, and attention sums over them in any order.)"""
    cache = engine.scheduler._cache
    lookup = cache.lookup

    def shifted(request: Any) -> list[int]:
        found = lookup(request)
        return [*found[:1], *found[:-1]]

    cache.lookup = shifted  # type: ignore[method-assign]


def read_a_neighbours_block(engine: Engine) -> None:
    """The last cached block is another request's."""
    cache = engine.scheduler._cache
    lookup = cache.lookup
    last_seen: list[int] = []

    def mixed(request: Any) -> list[int]:
        found = lookup(request)
        if found:
            wrong = [*found[:-1], last_seen[-1]] if last_seen else found
            last_seen.append(found[-1])
            return wrong
        return found

    cache.lookup = mixed  # type: ignore[method-assign]


# -- between ranks --------------------------------------------------------------------------------------------------


def lose_partial_sums(engine: Engine) -> None:
    """What rank 1's experts computed arrives nowhere."""
    transport = moe_of(engine).transport
    finalize = transport.finalize
    if engine.mesh.rank == 1:
        transport.finalize = lambda out, handle: finalize(torch.zeros_like(out), handle)  # type: ignore[method-assign]


def lose_foreign_sums(engine: Engine) -> None:
    """Rank 1 computes its own tokens only: those that rank 0 sent it come back as zeros."""
    transport = moe_of(engine).transport
    prepare = transport.prepare

    def own_only(x: Tensor, ids: Tensor, weights: Tensor, layout: Any) -> Transfer[Dispatched]:
        transfer = prepare(x, ids, weights, layout)

        def result() -> Dispatched:
            sent = transfer.result()
            no_rows = torch.ones(len(sent.x), dtype=torch.bool)
            is_foreign = ~(sent.x[:, None] == x).all(-1).any(-1) if len(x) else no_rows
            return dataclasses.replace(sent, local_ids=sent.local_ids.masked_fill(is_foreign[:, None], -1))

        return dataclasses.replace(transfer, result=result)

    if engine.mesh.rank == 1:
        transport.prepare = own_only  # type: ignore[method-assign]


def return_to_wrong_tokens(engine: Engine) -> None:
    """On rank 1 each token gets its neighbour's result."""
    transport = moe_of(engine).transport
    finalize = transport.finalize

    def shifted(expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        transfer = finalize(expert_out, handle)
        return dataclasses.replace(transfer, result=lambda: transfer.result().roll(1, 0))

    if engine.mesh.rank == 1:
        transport.finalize = shifted  # type: ignore[method-assign]


def remap_local_experts(engine: Engine) -> None:
    """Rank 1 takes its first expert for its second and the other way round."""
    transport = moe_of(engine).transport
    prepare = transport.prepare
    table = torch.tensor([1, 0, *range(2, moe_of(engine).experts.num_local_experts), -1])

    def remapped(x: Tensor, ids: Tensor, weights: Tensor, layout: Any) -> Transfer[Dispatched]:
        transfer = prepare(x, ids, weights, layout)

        def result() -> Dispatched:
            sent = transfer.result()
            return dataclasses.replace(sent, local_ids=table[sent.local_ids])

        return dataclasses.replace(transfer, result=result)

    if engine.mesh.rank == 1:
        transport.prepare = remapped  # type: ignore[method-assign]


V2, V3 = "v2-yarn", "v3-yarn-equal-ranks"
"""With YaRN and, so that their norms can be swapped, latents of equal width: few checkpoints show all faults."""
PREFIXES = {"enable_prefix_caching": True}

FAULTS: dict[str, Fault] = {
    "two experts swapped": Fault(V2, swap_experts),
    "gate and up of the experts swapped": Fault("qwen3", swap_gate_and_up),
    "gate and up of the shared experts swapped": Fault(V2, swap_gate_and_up_of_shared),
    "gate and up of the dense layer swapped": Fault(V3, swap_gate_and_up_of_dense),
    "shared experts dropped from V2": Fault(V2, drop_shared_experts),
    "shared experts dropped from V3": Fault(V3, drop_shared_experts),
    "input and post-attention norms swapped": Fault("qwen3", swap_layer_norms),
    "norms of the two latents swapped": Fault(V3, swap_latent_norms),
    "norms of queries and keys swapped": Fault("qwen3", swap_head_norms),
    "correction bias ignored": Fault(V3, ignore_correction_bias),
    "correction bias in the weights": Fault(V3, weigh_with_correction_bias),
    "top-k of Qwen3 not renormalised": Fault("qwen3", reroute(norm_topk_prob=False)),
    "top-k of Qwen3 renormalised unasked": Fault("qwen3-no-norm", reroute(norm_topk_prob=True)),
    "top-k of V3 not renormalised": Fault(V3, reroute(norm_topk_prob=False)),
    "group limit ignored": Fault("v2-groups", reroute(topk_method="greedy")),
    "routed scaling of V2 ignored": Fault("v2-groups", reroute(routed_scaling_factor=1.0)),
    "routed scaling of V3 ignored": Fault(V3, reroute(routed_scaling_factor=1.0)),
    "YaRN dropped": Fault(V2, rerope(rope_type="default")),
    "YaRN's attention factor dropped": Fault(V2, rerope(attention_factor=1.0)),
    "YaRN's mscale dropped": Fault(V2, rerope(mscale=0.0)),
    "YaRN's softmax scale dropped": Fault(V3, drop_softmax_mscale),
    "RoPE of V2 in halves": Fault(V2, rerope(interleaved=False)),
    "RoPE of Qwen3 in pairs": Fault("qwen3", rerope(interleaved=True)),
    "cached blocks off by one": Fault("qwen3", read_the_block_before, PREFIXES),
    "another request's cached block": Fault(V2, read_a_neighbours_block, PREFIXES),
}

RANK_FAULTS: dict[str, Plant] = {
    "partial sums lost in combine": lose_partial_sums,
    "other ranks' partial sums lost": lose_foreign_sums,
    "results to the wrong tokens": return_to_wrong_tokens,
    "local experts remapped": remap_local_experts,
}


def install() -> None:
    """In a rank process: every engine built from now on gets the fault that FAULT_FILE names (empty: none)."""
    install_from(RANK_FAULTS)


def install_from(plants: Mapping[str, Plant], before: Callable[[], object] = lambda: None) -> None:
    """As `install`, for one of these plants; `before` is called before an engine is built."""
    build = Engine.__init__

    def build_and_plant(self: Engine, *args: Any) -> None:
        before()
        build(self, *args)
        name = Path(os.environ[FAULT_FILE]).read_text()
        if name:
            plants[name](self)

    Engine.__init__ = build_and_plant  # type: ignore[method-assign]
