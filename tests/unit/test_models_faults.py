"""The oracle is not blind: every fault planted in a right model moves logits far beyond the tolerance of equality."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import paged
import pytest
import torch
from checkpoints import hf_reference, make
from torch import Tensor

from hocket.layers.rotary import RotaryEmbedding
from hocket.models.base import CausalLM, DecoderLayer
from hocket.models.deepseek import LatentAttention
from hocket.models.qwen3_moe import NormedHeadsAttention
from hocket.moe.layer import MoELayer

NOTICED = 1e-3
"""A hundred times the tolerance of `test_models`."""


def layer_of(model: CausalLM, index: int = 2) -> DecoderLayer:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer)
    return layer


def moe_of(model: CausalLM) -> MoELayer:
    mlp = layer_of(model).mlp
    assert isinstance(mlp, MoELayer)
    return mlp


def latent_of(model: CausalLM) -> LatentAttention:
    attention = layer_of(model).attention
    assert isinstance(attention, LatentAttention)
    return attention


def swap(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def swap_halves(x: Tensor, dim: int) -> None:
    x.copy_(x.roll(x.shape[dim] // 2, dim))


def reroute(model: CausalLM, **changes: object) -> None:
    for layer in model.layers:
        if isinstance(layer, DecoderLayer) and isinstance(layer.mlp, MoELayer):
            router = layer.mlp.router
            router.config = dataclasses.replace(router.config, **changes)  # type: ignore[arg-type]


def rerope(model: CausalLM, **changes: object) -> None:
    rope = dataclasses.replace(model.config.rope, **changes)  # type: ignore[arg-type]
    model.rotary = RotaryEmbedding(rope, paged.CPU)


def lose_most_used_expert(model: CausalLM, tokens: list[int]) -> None:
    moe = moe_of(model)
    moe.count_expert_load()
    paged.PagedRun(model).step([("a", tokens)])
    assert moe.expert_load is not None
    moe.experts.w2[int(moe.expert_load.argmax())] = 0


def drop_softmax_mscale(model: CausalLM) -> None:
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.attention, LatentAttention)
        layer.attention.scale = layer.attention.mla.qk_head_dim**-0.5


def ignore_correction_bias(model: CausalLM) -> None:
    bias = moe_of(model).router.e_score_correction_bias
    assert bias is not None
    bias.zero_()


def drop_shared_experts(model: CausalLM) -> None:
    moe_of(model).shared_experts = None


def swap_norms(model: CausalLM) -> None:
    layer = layer_of(model)
    swap(layer.input_norm.weight, layer.post_attention_norm.weight)


def swap_head_norms(model: CausalLM) -> None:
    attention = layer_of(model).attention
    assert isinstance(attention, NormedHeadsAttention)
    swap(attention.q_norm.weight, attention.k_norm.weight)


def forget_latent_norm(model: CausalLM) -> None:
    latent_of(model).kv_a_norm.weight.fill_(1)


def wrong_latent_eps(model: CausalLM) -> None:
    """Seen only where latents are small."""
    attention = latent_of(model)
    attention.kv_a_norm.eps = 1e-2


Fault = Callable[[CausalLM], object]
FAULTS: dict[str, tuple[str, Fault]] = {
    "norms swapped": ("v2", swap_norms),
    "head norms swapped": ("qwen3", swap_head_norms),
    "latent norm forgotten": ("v3", forget_latent_norm),
    "latent norm's eps": ("v3", wrong_latent_eps),
    "two experts swapped": ("v2", lambda m: swap(moe_of(m).experts.w2[3], moe_of(m).experts.w2[4])),
    "gate and up swapped": ("v2", lambda m: swap_halves(moe_of(m).experts.w13, 1)),
    "gate and up of the dense layer swapped": (
        "v2",
        lambda m: swap_halves(layer_of(m, 0).mlp.gate_up.weight, 0),  # type: ignore[union-attr,arg-type]
    ),
    "shared experts dropped": ("v3", drop_shared_experts),
    "correction bias ignored": ("v3", ignore_correction_bias),
    "top-k not renormalised": ("qwen3", lambda m: reroute(m, norm_topk_prob=False)),
    "top-k renormalised": ("qwen3-no-norm", lambda m: reroute(m, norm_topk_prob=True)),
    "top-k of V3 not renormalised": ("v3", lambda m: reroute(m, norm_topk_prob=False)),
    "routed scaling dropped": ("v2-groups", lambda m: reroute(m, routed_scaling_factor=1.0)),
    "group limit dropped": ("v2-groups", lambda m: reroute(m, topk_method="greedy")),
    "group limit of V3 dropped": ("v3", lambda m: reroute(m, topk_groups=4)),
    "YaRN dropped": ("v3-yarn", lambda m: rerope(m, rope_type="default")),
    "YaRN's factor on cos and sin dropped": ("v2-yarn-plain", lambda m: rerope(m, attention_factor=1.0)),
    "YaRN's mscale ignored": ("v2-yarn", lambda m: rerope(m, mscale=0.0)),
    "YaRN's softmax scale dropped": ("v3-yarn", drop_softmax_mscale),
    "YaRN's ramp from the wrong end": ("qwen3-yarn", lambda m: rerope(m, beta_fast=1.0, beta_slow=32.0)),
    "linear factor dropped": ("v2-linear", lambda m: rerope(m, factor=1.0)),
    "theta": ("qwen3", lambda m: rerope(m, theta=5000.0)),
    "halves instead of pairs": ("v3", lambda m: rerope(m, interleaved=False)),
    "pairs instead of halves": ("v3-halves", lambda m: rerope(m, interleaved=True)),
}


def distance(model: CausalLM, path: Path, tokens: list[int]) -> float:
    """Largest |Δlogit| to transformers, prefill and one decode step (the two attention paths) alike the same tokens."""
    run = paged.PagedRun(model)
    first = run.step([("a", tokens[:-1])])["a"]
    last = run.step([("a", tokens[-1:])])["a"]
    return float((torch.cat((first, last)) - hf_reference(path).logits(tokens)).abs().max())


@pytest.mark.parametrize("fault", FAULTS)
def test_is_noticed(fault: str, checkpoints: Path) -> None:
    name, plant = FAULTS[fault]
    path = make(name, checkpoints)
    tokens = hf_reference(path).prompts([40], 0)[0]
    model = paged.load(path)
    assert distance(model, path, tokens) < 1e-5
    plant(model)
    assert distance(model, path, tokens) > NOTICED


@pytest.mark.parametrize("name", ["v2", "v3", "qwen3"])
def test_a_lost_expert_is_noticed(name: str, checkpoints: Path) -> None:
    path = make(name, checkpoints)
    tokens = hf_reference(path).prompts([40], 0)[0]
    model = paged.load(path)
    lose_most_used_expert(model, tokens)
    assert distance(model, path, tokens) > NOTICED
