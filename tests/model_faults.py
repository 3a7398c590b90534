"""Faults to plant in a model, each of a kind that real systems have had. For tests only; knows no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hocket.layers.mlp import GatedMLP
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import RotaryEmbedding
from hocket.models.base import CausalLM, DecoderLayer
from hocket.models.deepseek import LatentAttention
from hocket.models.qwen3_moe import NormedHeadsAttention
from hocket.moe.layer import MoELayer

LAYER = 2
ModelPlant = Callable[[CausalLM], object]


def layer_of(model: CausalLM, index: int = LAYER) -> DecoderLayer:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer)
    return layer


def moe_layers(model: CausalLM) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def moe_of(model: CausalLM) -> MoELayer:
    mlp = layer_of(model).mlp
    assert isinstance(mlp, MoELayer)
    return mlp


def latent_of(model: CausalLM, index: int = LAYER) -> LatentAttention:
    attention = layer_of(model, index).attention
    assert isinstance(attention, LatentAttention)
    return attention


def swap(a: Tensor, b: Tensor) -> None:
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def swap_halves(x: Tensor, dim: int) -> None:
    x.copy_(x.roll(x.shape[dim] // 2, dim))


# -- experts --------------------------------------------------------------------------------------------------------


def swap_experts(model: CausalLM) -> None:
    """Two experts answer to each other's ids."""
    experts = moe_of(model).experts
    swap(experts.w13[3], experts.w13[4])
    swap(experts.w2[3], experts.w2[4])


def swap_gate_and_up(model: CausalLM) -> None:
    swap_halves(moe_of(model).experts.w13, 1)


def swap_gate_and_up_of_shared(model: CausalLM) -> None:
    shared = moe_of(model).shared_experts
    assert isinstance(shared, GatedMLP)
    swap_halves(shared.gate_up.weight, 0)


def swap_gate_and_up_of_dense(model: CausalLM) -> None:
    mlp = layer_of(model, 0).mlp
    assert isinstance(mlp, GatedMLP)
    swap_halves(mlp.gate_up.weight, 0)


def drop_shared_experts(model: CausalLM) -> None:
    moe_of(model).shared_experts = None


# -- routing --------------------------------------------------------------------------------------------------------


def reroute(**changes: Any) -> ModelPlant:
    """Routers with other settings."""

    def plant(model: CausalLM) -> None:
        for layer in moe_layers(model):
            layer.router.config = dataclasses.replace(layer.router.config, **changes)

    return plant


def ignore_correction_bias(model: CausalLM) -> None:
    bias = moe_of(model).router.e_score_correction_bias
    assert bias is not None
    bias.zero_()


def weigh_with_correction_bias(model: CausalLM) -> None:
    """The bias, which may only change the choice, gets into the weights as well."""
    router = moe_of(model).router
    choose = router.forward

    def forward(x: Tensor, is_padding: Tensor | None) -> tuple[Tensor, Tensor]:
        _, ids = choose(x, is_padding)
        scores = F.linear(x.to(router.weight.dtype), router.weight).float().sigmoid() + router.e_score_correction_bias
        weights = scores.gather(-1, ids.clamp(min=0))
        return weights / weights.sum(-1, keepdim=True) * router.config.routed_scaling_factor, ids

    router.forward = forward  # type: ignore[method-assign]


# -- norms and rotary -----------------------------------------------------------------------------------------------


def swap_layer_norms(model: CausalLM) -> None:
    layer = layer_of(model)
    swap(layer.input_norm.weight, layer.post_attention_norm.weight)


def swap_latent_norms(model: CausalLM) -> None:
    attention = latent_of(model)
    assert isinstance(attention.q_a_norm, RMSNorm)
    swap(attention.q_a_norm.weight, attention.kv_a_norm.weight)


def swap_head_norms(model: CausalLM) -> None:
    attention = layer_of(model).attention
    assert isinstance(attention, NormedHeadsAttention)
    swap(attention.q_norm.weight, attention.k_norm.weight)


def forget_latent_norm(model: CausalLM) -> None:
    latent_of(model).kv_a_norm.weight.fill_(1)


def wrong_latent_eps(model: CausalLM) -> None:
    """Seen only where latents are small."""
    latent_of(model).kv_a_norm.eps = 1e-2


def rerope(**changes: Any) -> ModelPlant:
    """Rotary tables of other settings."""

    def plant(model: CausalLM) -> None:
        rope = dataclasses.replace(model.config.rope, **changes)
        model.rotary = RotaryEmbedding(rope, model.embed_tokens.device)

    return plant


def drop_softmax_mscale(model: CausalLM) -> None:
    for index in range(len(model.layers)):
        attention = latent_of(model, index)
        attention.scale = attention.mla.qk_head_dim**-0.5
