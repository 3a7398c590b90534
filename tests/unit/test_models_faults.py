"""The oracle is not blind: every fault planted in a right model moves logits far beyond the tolerance of equality."""

from __future__ import annotations

from pathlib import Path

import paged
import pytest
import torch
from checkpoints import hf_reference, make
from model_faults import (
    ModelPlant,
    drop_shared_experts,
    drop_softmax_mscale,
    forget_latent_norm,
    ignore_correction_bias,
    moe_of,
    rerope,
    reroute,
    swap_experts,
    swap_gate_and_up,
    swap_gate_and_up_of_dense,
    swap_head_norms,
    swap_layer_norms,
    wrong_latent_eps,
)

from hocket.models.base import CausalLM

NOTICED = 1e-3
"""A hundred times the tolerance of `test_models`."""


def lose_most_used_expert(model: CausalLM, tokens: list[int]) -> None:
    moe = moe_of(model)
    moe.count_expert_load()
    paged.PagedRun(model).step([("a", tokens)])
    assert moe.expert_load is not None
    moe.experts.w2[int(moe.expert_load.argmax())] = 0


FAULTS: dict[str, tuple[str, ModelPlant]] = {
    "norms swapped": ("v2", swap_layer_norms),
    "head norms swapped": ("qwen3", swap_head_norms),
    "latent norm forgotten": ("v3", forget_latent_norm),
    "latent norm's eps": ("v3", wrong_latent_eps),
    "two experts swapped": ("v2", swap_experts),
    "gate and up swapped": ("v2", swap_gate_and_up),
    "gate and up of the dense layer swapped": ("v2", swap_gate_and_up_of_dense),
    "shared experts dropped": ("v3", drop_shared_experts),
    "correction bias ignored": ("v3", ignore_correction_bias),
    "top-k not renormalised": ("qwen3", reroute(norm_topk_prob=False)),
    "top-k renormalised": ("qwen3-no-norm", reroute(norm_topk_prob=True)),
    "top-k of V3 not renormalised": ("v3", reroute(norm_topk_prob=False)),
    "routed scaling dropped": ("v2-groups", reroute(routed_scaling_factor=1.0)),
    "group limit dropped": ("v2-groups", reroute(topk_method="greedy")),
    "group limit of V3 dropped": ("v3", reroute(topk_groups=4)),
    "YaRN dropped": ("v3-yarn", rerope(rope_type="default")),
    "YaRN's factor on cos and sin dropped": ("v2-yarn-plain", rerope(attention_factor=1.0)),
    "YaRN's mscale ignored": ("v2-yarn", rerope(mscale=0.0)),
    "YaRN's softmax scale dropped": ("v3-yarn", drop_softmax_mscale),
    "YaRN's ramp from the wrong end": ("qwen3-yarn", rerope(beta_fast=1.0, beta_slow=32.0)),
    "linear factor dropped": ("v2-linear", rerope(factor=1.0)),
    "theta": ("qwen3", rerope(theta=5000.0)),
    "halves instead of pairs": ("v3", rerope(interleaved=False)),
    "pairs instead of halves": ("v3-halves", rerope(interleaved=True)),
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
