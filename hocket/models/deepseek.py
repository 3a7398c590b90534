"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention. Routing differs by configuration alone.

Legend: T tokens, D hidden, H heads, N unrotated and P rotated width of a head, V value width, L latent width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hocket.attention.mla import absorbed
from hocket.attention.plan import Plan
from hocket.config.model import ModelConfig
from hocket.errors import ConfigError
from hocket.layers.linear import Linear
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import Rotation, softmax_scale
from hocket.models.backends import Backends, Product
from hocket.models.base import Attention, CausalLM
from hocket.models.weights import WeightSpec, linear_specs, norm_spec

LATENT_NORM_EPS = 1e-6  # whatever config.rms_norm_eps says


class LatentAttention(Attention):
    """Queries (by way of a low rank, if q_lora_rank is given) and one latent per token, from one merged projection."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, backends: Backends) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None
        if config.rope.dim != mla.qk_rope_head_dim:
            raise ConfigError("rotary dim", config.rope.dim, f"qk_rope_head_dim ({mla.qk_rope_head_dim})")
        self.mla = mla
        self.num_heads = config.num_heads
        self.has_bias = config.attention_bias
        self.scale = softmax_scale(config)
        self.backends = backends
        linear = partial(Linear, device=device, dtype=dtype, kernels=backends.kernels)
        norm = partial(RMSNorm, eps=LATENT_NORM_EPS, device=device, dtype=dtype, kernels=backends.kernels)
        query_width = config.num_heads * mla.qk_head_dim
        self.q_a_width = mla.q_lora_rank or query_width
        self.qkv_a = linear(config.hidden_size, self.q_a_width + mla.latent_dim, bias=self.has_bias)
        self.q_a_norm: RMSNorm | None = None
        self.q_b: Linear | None = None
        if mla.q_lora_rank is not None:
            self.q_a_norm = norm(mla.q_lora_rank)
            self.q_b = linear(mla.q_lora_rank, query_width)
        self.kv_a_norm = norm(mla.kv_lora_rank)
        expanded = config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b = linear(mla.kv_lora_rank, expanded)
        self.o = linear(config.num_heads * mla.v_head_dim, config.hidden_size, bias=self.has_bias)

    def forward(self, x: Tensor, rotation: Rotation, plan: Plan, cache: Tensor) -> Tensor:
        """x [T, D] → [T, D]."""
        mla = self.mla
        widths = self.q_a_width, mla.kv_lora_rank, mla.qk_rope_head_dim
        q, compressed, k_rot = self.qkv_a(x).split_with_sizes(widths, dim=-1)
        if self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm(q))
        q = q.view(q.shape[0], self.num_heads, mla.qk_head_dim)
        norm, kernels, attention = self.kv_a_norm, self.backends.kernels, self.backends.attention
        query, latent, is_stored = kernels.latent_rows(
            q, compressed, k_rot, norm.weight, norm.eps, rotation, attention.places(cache, plan)
        )
        return self.o(attention.latent(query, latent, self._kv_b, cache, plan, self.scale, is_stored))

    @property
    def _kv_b(self) -> Tensor:
        """The latent's expansion per head: [H, N + V, L]."""
        return self.kv_b.weight.view(self.num_heads, -1, self.mla.kv_lora_rank)

    def products(self) -> Iterator[Product]:
        """Into the latent space and out of it."""
        for name, weight in zip(("into", "out of"), absorbed(self._kv_b, self.mla.qk_nope_head_dim), strict=True):
            yield Product(
                name=f"{name} the latent",
                run=partial(self.backends.kernels.per_head, weight=weight),
                shape=tuple(weight.shape[:2]),
                dtype=weight.dtype,
                key=("per_head", tuple(weight.shape), weight.dtype, weight.stride()),
            )

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        """As published: q_proj, or q_a_proj + q_a_layernorm + q_b_proj; only the latter's first part has a bias."""
        if self.q_a_norm is None or self.q_b is None:
            yield from linear_specs(f"{prefix}.q_proj", self.qkv_a, 0, self.q_a_width)
        else:
            yield from linear_specs(f"{prefix}.q_a_proj", self.qkv_a, 0, self.q_a_width, bias=self.has_bias)
            yield norm_spec(f"{prefix}.q_a_layernorm", self.q_a_norm)
            yield from linear_specs(f"{prefix}.q_b_proj", self.q_b)
        yield from linear_specs(f"{prefix}.kv_a_proj_with_mqa", self.qkv_a, self.q_a_width, bias=self.has_bias)
        yield norm_spec(f"{prefix}.kv_a_layernorm", self.kv_a_norm)
        yield from linear_specs(f"{prefix}.kv_b_proj", self.kv_b, is_called=False)
        yield from linear_specs(f"{prefix}.o_proj", self.o, bias=self.has_bias)


class DeepseekForCausalLM(CausalLM):
    """DeepSeek-V2 and V3."""

    def build_attention(self, device: torch.device) -> Attention:
        return LatentAttention(self.config, device, self.dtype, self.backends)
