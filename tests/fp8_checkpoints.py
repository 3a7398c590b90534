"""Tiny checkpoints in block-scaled fp8, and the same ones expanded. For tests only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paged
import torch
from checkpoints import CONFIGS
from safetensors.torch import save_file
from torch import Tensor

from hocket.config.model import ModelConfig
from hocket.models.registry import build_model
from hocket.quant import fp8

Tensors = dict[str, Tensor]
WIDE: dict[str, Any] = {
    **CONFIGS["v3"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "v_head_dim": 32,
    "n_shared_experts": 2,
}
"""Widths are whole blocks, as DeepSeek-V3's are; kv_a_proj_with_mqa has 136 rows, which are not."""


def quantized_part(name: str) -> bool:
    """Whether published checkpoints have this tensor in fp8."""
    return "_proj" in name and name.endswith(".weight")


def write(
    path: Path,
    config: dict[str, Any] = WIDE,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """A folder with config.json and random weights in fp8, whose tensors `edit` may change before they are written."""
    path.mkdir()
    values = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", **(quantization or {})}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": values, "dtype": "bfloat16"}))
    model_config = ModelConfig.from_dict(config)
    model = build_model(model_config, paged.one_rank_factory(model_config), paged.CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for spec in model.weight_specs():
        value = torch.randn(spec.shape, generator=generator)
        value = value * spec.shape[1] ** -0.5 if value.dim() > 1 else value * 0.1 + float("norm" in spec.name)
        if quantized_part(spec.name):
            tensors[spec.name], tensors[f"{spec.name}_scale_inv"] = fp8.quantize_blocks(value)
        else:
            tensors[spec.name] = value
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path
