"""Model types by name, imported when asked for. Knows nothing of what a model is made of."""

from __future__ import annotations

import torch

from hocket.config.model import MODEL_TYPES, ModelConfig
from hocket.errors import ConfigError
from hocket.models.backends import DEFAULT, Backends
from hocket.models.base import CausalLM
from hocket.moe.factory import MoEFactory


def model_class(model_type: str) -> type[CausalLM]:
    """The class for config.json's `model_type`; ConfigError lists the known ones."""
    if model_type in ("deepseek_v2", "deepseek_v3"):
        from hocket.models.deepseek import DeepseekForCausalLM

        return DeepseekForCausalLM
    if model_type == "qwen3_moe":
        from hocket.models.qwen3_moe import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM
    raise ConfigError("model_type", model_type, ", ".join(MODEL_TYPES))


def build_model(
    config: ModelConfig, moe: MoEFactory, device: torch.device, dtype: torch.dtype, backends: Backends = DEFAULT
) -> CausalLM:
    """The model on `device` in `dtype`, with the experts of the factory's rank; weights are unset until loaded."""
    return model_class(config.model_type)(config, moe, device, dtype, backends)
