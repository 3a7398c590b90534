"""Configurations that make sense, to be changed by tests: a config.json and a sparse layer's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hocket.config.moe import MoEConfig

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}

MOE = MoEConfig(
    num_experts=8,
    top_k=3,
    intermediate_size=16,
    num_shared_experts=1,
    scoring="sigmoid",
    topk_method="noaux_tc",
    num_groups=4,
    topk_groups=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    layers=(True,),
)
"""Routing as in DeepSeek-V3."""
PLAIN_MOE = replace(
    MOE,
    num_shared_experts=0,
    scoring="softmax",
    topk_method="greedy",
    num_groups=1,
    topk_groups=1,
    routed_scaling_factor=1.0,
)
"""Routing as in Qwen3-MoE."""
