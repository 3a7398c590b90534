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
from model_faults import (
    ModelPlant,
    drop_shared_experts,
    drop_softmax_mscale,
    ignore_correction_bias,
    moe_layers,
    moe_of,
    rerope,
    reroute,
    swap_experts,
    swap_gate_and_up,
    swap_gate_and_up_of_dense,
    swap_gate_and_up_of_shared,
    swap_head_norms,
    swap_latent_norms,
    swap_layer_norms,
    weigh_with_correction_bias,
)
from torch import Tensor

from hocket.engine import Engine
from hocket.models.base import CausalLM
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.ubatch.transfer import Transfer

FAULT_FILE = "FAULT_FILE"
Plant = Callable[[Engine], None]


def in_model(plant: ModelPlant) -> Plant:
    """A model's fault, planted in the model of an engine."""

    def plant_in_engine(engine: Engine) -> None:
        plant(model_of(engine))

    return plant_in_engine


@dataclasses.dataclass(frozen=True)
class Fault:
    """A plant, the checkpoint it shows in, and options it needs."""

    model: str
    plant: Plant
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def model_of(engine: Engine) -> CausalLM:
    return engine.runner.model


def transport_of(engine: Engine) -> Transport:
    return moe_of(model_of(engine)).transport


def lose_expert(engine: Engine, moe_layer: int, expert: int) -> None:
    """One expert's output is zero (on the rank that holds all)."""
    moe_layers(model_of(engine))[moe_layer].experts.w2[expert] = 0


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
    transport = transport_of(engine)
    finalize = transport.finalize
    if engine.mesh.rank == 1:
        transport.finalize = lambda out, handle: finalize(torch.zeros_like(out), handle)  # type: ignore[method-assign]


def lose_foreign_sums(engine: Engine) -> None:
    """Rank 1 computes its own tokens only: those that rank 0 sent it come back as zeros."""
    transport = transport_of(engine)
    prepare = transport.prepare

    def own_only(x: Tensor, ids: Tensor, weights: Tensor, layout: Any) -> Transfer[Dispatched]:
        transfer = prepare(x, ids, weights, layout)

        def result() -> Dispatched:
            sent = transfer.result()
            no_rows = torch.ones(len(sent.x), dtype=torch.bool)
            is_foreign = ~(sent.x[:, None] == x).all(-1).any(-1) if len(x) else no_rows
            return dataclasses.replace(sent, ids=sent.ids.masked_fill(is_foreign[:, None], -1))

        return dataclasses.replace(transfer, result=result)

    if engine.mesh.rank == 1:
        transport.prepare = own_only  # type: ignore[method-assign]


def return_to_wrong_tokens(engine: Engine) -> None:
    """On rank 1 each token gets its neighbour's result."""
    transport = transport_of(engine)
    finalize = transport.finalize

    def shifted(expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        transfer = finalize(expert_out, handle)
        return dataclasses.replace(transfer, result=lambda: transfer.result().roll(1, 0))

    if engine.mesh.rank == 1:
        transport.finalize = shifted  # type: ignore[method-assign]


def remap_local_experts(engine: Engine) -> None:
    """Rank 1 takes its first expert for its second and the other way round."""
    if engine.mesh.rank == 1:
        for layer in moe_layers(model_of(engine)):
            experts = layer.experts
            assert experts.local_id_of is not None
            swapped = torch.tensor([1, 0, *range(2, experts.num_local_experts), -1])
            experts.local_id_of = swapped[experts.local_id_of]


V2, V3 = "v2-yarn", "v3-yarn-equal-ranks"
"""With YaRN and, so that their norms can be swapped, latents of equal width: few checkpoints show all faults."""
PREFIXES = {"enable_prefix_caching": True}

FAULTS: dict[str, Fault] = {
    "two experts swapped": Fault(V2, in_model(swap_experts)),
    "gate and up of the experts swapped": Fault("qwen3", in_model(swap_gate_and_up)),
    "gate and up of the shared experts swapped": Fault(V2, in_model(swap_gate_and_up_of_shared)),
    "gate and up of the dense layer swapped": Fault(V3, in_model(swap_gate_and_up_of_dense)),
    "shared experts dropped from V2": Fault(V2, in_model(drop_shared_experts)),
    "shared experts dropped from V3": Fault(V3, in_model(drop_shared_experts)),
    "input and post-attention norms swapped": Fault("qwen3", in_model(swap_layer_norms)),
    "norms of the two latents swapped": Fault(V3, in_model(swap_latent_norms)),
    "norms of queries and keys swapped": Fault("qwen3", in_model(swap_head_norms)),
    "correction bias ignored": Fault(V3, in_model(ignore_correction_bias)),
    "correction bias in the weights": Fault(V3, in_model(weigh_with_correction_bias)),
    "top-k of Qwen3 not renormalised": Fault("qwen3", in_model(reroute(norm_topk_prob=False))),
    "top-k of Qwen3 renormalised unasked": Fault("qwen3-no-norm", in_model(reroute(norm_topk_prob=True))),
    "top-k of V3 not renormalised": Fault(V3, in_model(reroute(norm_topk_prob=False))),
    "group limit ignored": Fault("v2-groups", in_model(reroute(topk_method="greedy"))),
    "routed scaling of V2 ignored": Fault("v2-groups", in_model(reroute(routed_scaling_factor=1.0))),
    "routed scaling of V3 ignored": Fault(V3, in_model(reroute(routed_scaling_factor=1.0))),
    "YaRN dropped": Fault(V2, in_model(rerope(rope_type="default"))),
    "YaRN's attention factor dropped": Fault(V2, in_model(rerope(attention_factor=1.0))),
    "YaRN's mscale dropped": Fault(V2, in_model(rerope(mscale=0.0))),
    "YaRN's softmax scale dropped": Fault(V3, in_model(drop_softmax_mscale)),
    "RoPE of V2 in halves": Fault(V2, in_model(rerope(interleaved=False))),
    "RoPE of Qwen3 in pairs": Fault("qwen3", in_model(rerope(interleaved=True))),
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
