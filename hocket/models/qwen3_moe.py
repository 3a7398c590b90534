"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with normalised heads. Knows nothing of how experts are spread.

Legend: T tokens, D hidden, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hocket.attention.plan import Plan
from hocket.config.model import ModelConfig
from hocket.errors import ConfigError
from hocket.layers.linear import Linear
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import Rotation, softmax_scale
from hocket.models.backends import Backends
from hocket.models.base import Attention, CausalLM
from hocket.models.weights import WeightSpec, linear_specs, norm_spec


class NormedHeadsAttention(Attention):
    """Queries, keys and values from one merged projection; queries and keys are normalised per head, then rotated."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, backends: Backends) -> None:
        super().__init__()
        if config.rope.dim != config.head_dim:
            raise ConfigError("rotary dim", config.rope.dim, f"head_dim ({config.head_dim})")
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.has_bias = config.attention_bias
        self.scale = softmax_scale(config)
        self.backends = backends
        linear = partial(Linear, bias=self.has_bias, device=device, dtype=dtype, kernels=backends.kernels)
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = linear(config.hidden_size, heads * config.head_dim)
        norm = partial(RMSNorm, config.head_dim, config.rms_norm_eps, device=device, dtype=dtype)
        self.q_norm, self.k_norm = norm(kernels=backends.kernels), norm(kernels=backends.kernels)
        self.o = linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation, plan: Plan, cache: Tensor) -> Tensor:
        """x [T, D] → [T, D]."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        query, key, value = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        weights = self.q_norm.weight, self.k_norm.weight
        query, key = self.backends.kernels.normed_heads(query, key, *weights, self.q_norm.eps, rotation)
        out: Tensor = self.o(self.backends.attention.grouped_query(query, key, value, cache, plan, self.scale))
        return out

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        """As published: q_proj, k_proj, v_proj, o_proj, q_norm, k_norm."""
        first, end = 0, 0
        for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            first, end = end, end + heads * self.head_dim
            yield from linear_specs(f"{prefix}.{name}_proj", self.qkv, first, end, bias=self.has_bias)
        yield from linear_specs(f"{prefix}.o_proj", self.o, bias=self.has_bias)
        yield norm_spec(f"{prefix}.q_norm", self.q_norm)
        yield norm_spec(f"{prefix}.k_norm", self.k_norm)


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3-MoE. Its router computes logits in the model's dtype."""

    router_dtype = None

    def build_attention(self, device: torch.device) -> Attention:
        return NormedHeadsAttention(self.config, device, self.dtype, self.backends)
