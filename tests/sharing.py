"""OLMoE whose layers use what the layer before left behind: half of its values are added to their own.

For tests only. CARRY says where they are kept: "per-ubatch" in a `PerUBatch` that all layers share, "global" in one
buffer for all, as it must not be.
"""

from __future__ import annotations

import os

import olmoe
import torch
from torch import Tensor

from hocket.attention.plan import Plan
from hocket.config.model import ModelConfig
from hocket.layers.rotary import Rotation
from hocket.models import registry
from hocket.models.backends import Backends
from hocket.models.base import Attention
from hocket.ubatch.scratch import PerUBatch

CARRY = "CARRY"
MOST_TOKENS = 512


Kept = PerUBatch[Tensor]


class SharingAttention(olmoe.OlmoeAttention):
    """kept: a buffer [MOST_TOKENS, H, d] with the values of the layer before, then this one's."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        backends: Backends,
        *,
        first: bool,
        kept: Kept,
    ) -> None:
        super().__init__(config, device, dtype, backends)
        self.first = first
        self.kept = kept

    def forward(self, x: Tensor, rotation: Rotation, plan: Plan, cache: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        query = rotation.rotate(self.q_norm(self.q(x)).unflatten(-1, heads))
        key = rotation.rotate(self.k_norm(self.k(x)).unflatten(-1, heads))
        value = self.v(x).unflatten(-1, heads)
        buffer = self.kept.value
        num_tokens = value.shape[0]
        if not self.first:
            value = value + buffer[:num_tokens] / 2
        buffer[:num_tokens] = value
        out: Tensor = self.o(self.attention.grouped_query(query, key, value, cache, plan, self.head_dim**-0.5))
        return out


class SharingForCausalLM(olmoe.OlmoeForCausalLM):
    """All layers write one scratch buffer, and each reads what the layer before wrote there."""

    def build_attention(self, device: torch.device) -> Attention:
        config = self.config
        first = not hasattr(self, "kept")
        if first:
            shape = (MOST_TOKENS, config.num_kv_heads, config.head_dim)

            def make() -> Tensor:
                return torch.full(shape, torch.nan, device=device, dtype=self.dtype)

            self.kept: Kept = PerUBatch(make)
            if os.environ[CARRY] == "global":
                shared = make()
                self.kept = PerUBatch(lambda: shared)
        return SharingAttention(config, device, self.dtype, self.backends, first=first, kept=self.kept)


def register() -> None:
    """Make "olmoe" mean this model in this process."""
    known = registry.model_class
    registry.model_class = lambda name: SharingForCausalLM if name == "olmoe" else known(name)
