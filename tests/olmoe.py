"""OLMoE (arXiv 2409.02060), a model Hocket does not ship, written as a user would: attention and nothing else.

For tests only. There is no word here of ranks, transports, batches or ubatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from absent import block
from torch import Tensor

from hocket.attention.plan import Plan
from hocket.config.model import ModelConfig, read_json
from hocket.layers.linear import Linear
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import Rotation
from hocket.models import registry
from hocket.models.backends import Backends
from hocket.models.base import Attention, CausalLM
from hocket.models.weights import WeightSpec, linear_specs, norm_spec


class OlmoeAttention(Attention):
    """Queries and keys are normalised over all heads together."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, backends: Backends) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention = backends.attention
        linear = partial(Linear, device=device, dtype=dtype, kernels=backends.kernels)
        self.q = linear(config.hidden_size, width)
        self.k = linear(config.hidden_size, kv_width)
        self.v = linear(config.hidden_size, kv_width)
        self.o = linear(width, config.hidden_size)
        self.q_norm = RMSNorm(width, config.rms_norm_eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(kv_width, config.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, rotation: Rotation, plan: Plan, cache: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        query = rotation.rotate(self.q_norm(self.q(x)).unflatten(-1, heads))
        key = rotation.rotate(self.k_norm(self.k(x)).unflatten(-1, heads))
        value = self.v(x).unflatten(-1, heads)
        out: Tensor = self.o(self.attention.grouped_query(query, key, value, cache, plan, self.head_dim**-0.5))
        return out

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        for name in ("q", "k", "v", "o"):
            yield from linear_specs(f"{prefix}.{name}_proj", getattr(self, name))
        yield norm_spec(f"{prefix}.q_norm", self.q_norm)
        yield norm_spec(f"{prefix}.k_norm", self.k_norm)


class OlmoeForCausalLM(CausalLM):
    router_dtype = None

    def build_attention(self, device: torch.device) -> Attention:
        return OlmoeAttention(self.config, device, self.dtype, self.backends)


def read_config(path: str | Path) -> ModelConfig:
    """OLMoE's config.json has Qwen3-MoE's keys, but `intermediate_size` is that of an expert."""
    values = read_json(Path(path) / "config.json")
    qwen = {**values, "model_type": "qwen3_moe", "moe_intermediate_size": values["intermediate_size"]}
    return replace(ModelConfig.from_dict(qwen), model_type="olmoe")


def register() -> None:
    """Make "olmoe" known to this process."""
    known = registry.model_class
    registry.model_class = lambda name: OlmoeForCausalLM if name == "olmoe" else known(name)


def register_without_optional_packages() -> None:
    """Also make every package that Hocket can do without look as if it were not installed."""
    block()
    register()
