"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention. Routing differs by configuration alone.

Legend: T tokens, D hidden, H heads, N unrotated and P rotated width of a head, V value width, L latent width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hocket.attention.mla import paged_mla
from hocket.attention.plan import AttentionPlan
from hocket.config.model import ModelConfig
from hocket.errors import ConfigError
from hocket.layers.linear import Linear
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import Rotation, softmax_mscale
from hocket.models.base import Attention, CausalLM
from hocket.models.weights import WeightSpec, linear_specs, norm_spec

LATENT_NORM_EPS = 1e-6  # whatever config.rms_norm_eps says


class LatentAttention(Attention):
    """Queries (by way of a low rank, if q_lora_rank is given) and one latent per token, from one merged projection."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None
        if config.rope.dim != mla.qk_rope_head_dim:
            raise ConfigError("rotary dim", config.rope.dim, f"qk_rope_head_dim ({mla.qk_rope_head_dim})")
        self.mla = mla
        self.num_heads = config.num_heads
        self.has_bias = config.attention_bias
        self.scale = mla.qk_head_dim**-0.5 * softmax_mscale(config.rope)
        query_width = config.num_heads * mla.qk_head_dim
        self.q_a_width = mla.q_lora_rank or query_width
        self.qkv_a = Linear(
            config.hidden_size, self.q_a_width + mla.latent_dim, bias=self.has_bias, device=device, dtype=dtype
        )
        self.q_a_norm: RMSNorm | None = None
        self.q_b: Linear | None = None
        if mla.q_lora_rank is not None:
            self.q_a_norm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS, device=device, dtype=dtype)
            self.q_b = Linear(mla.q_lora_rank, query_width, device=device, dtype=dtype)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS, device=device, dtype=dtype)
        expanded = config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b = Linear(mla.kv_lora_rank, expanded, device=device, dtype=dtype)
        self.o = Linear(
            config.num_heads * mla.v_head_dim, config.hidden_size, bias=self.has_bias, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, rotation: Rotation, plan: AttentionPlan, cache: Tensor) -> Tensor:
        """x [T, D] → [T, D]."""
        mla = self.mla
        q, compressed, k_rot = self.qkv_a(x).split((self.q_a_width, mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        if self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm(q))
        q = q.unflatten(-1, (self.num_heads, mla.qk_head_dim))
        q_plain, q_rot = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        query = torch.cat((q_plain, rotation.rotate(q_rot)), dim=-1)
        latent = torch.cat((self.kv_a_norm(compressed), rotation.rotate(k_rot[:, None])[:, 0]), dim=-1)
        kv_b = self.kv_b.weight.view(self.num_heads, -1, mla.kv_lora_rank)
        out: Tensor = self.o(paged_mla(query, latent, kv_b, cache, plan, self.scale))
        return out

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
        yield from linear_specs(f"{prefix}.kv_b_proj", self.kv_b)
        yield from linear_specs(f"{prefix}.o_proj", self.o, bias=self.has_bias)


class DeepseekForCausalLM(CausalLM):
    """DeepSeek-V2 and V3."""

    def build_attention(self, device: torch.device) -> Attention:
        return LatentAttention(self.config, device, self.dtype)
