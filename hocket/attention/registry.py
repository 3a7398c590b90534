"""Attention backends by name. Knows which exist, not what they promise (`config/backends.py` does)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.attention.backend import AttentionBackend
from hocket.attention.base import AttentionMetadata
from hocket.attention.mla import paged_mla
from hocket.attention.plan import AttentionPlan, plan_attention
from hocket.attention.sdpa import paged_attention
from hocket.config.backends import ATTENTION
from hocket.errors import BackendUnavailable


class SdpaAttention(AttentionBackend[AttentionPlan]):
    """PyTorch's scaled_dot_product_attention, for speed: decodes in one call, prefills request by request."""

    name = "sdpa"

    def plan(
        self, meta: AttentionMetadata, num_rows: int, block_size: int, dtype: torch.dtype, slot_bytes: int
    ) -> AttentionPlan:
        return plan_attention(meta, num_rows, block_size, dtype, slot_bytes)

    def grouped_query(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        return paged_attention(query, key, value, cache, plan, scale)

    def latent(
        self, query: Tensor, latent: Tensor, kv_b: Tensor, cache: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        return paged_mla(query, latent, kv_b, cache, plan, scale)


def attention_backend(name: str) -> AttentionBackend[Any]:
    """The backend `name`; BackendUnavailable lists the known names."""
    if name == "sdpa":
        return SdpaAttention()
    if name == "tiled":
        from hocket.attention.tiled import TiledAttention

        return TiledAttention()
    raise BackendUnavailable("attention backend", name, "there is no such backend", ATTENTION)
