"""Checkpoints beyond those of `checkpoints`: further shapes, and edited copies. For tests only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import checkpoints
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
FP8_BLOCK = 32
_QWEN, _V3_YARN = checkpoints.CONFIGS["qwen3"], checkpoints.CONFIGS["v3-yarn"]

CONFIGS: dict[str, dict[str, Any]] = {
    "v3-yarn-equal-ranks": {**_V3_YARN, "q_lora_rank": _V3_YARN["kv_lora_rank"]},
    "qwen3-first-dense": {**_QWEN, "mlp_only_layers": [0]},
    "qwen3-two-experts": {**_QWEN, "num_experts": 2, "num_experts_per_tok": 1},
    "qwen3-many-experts": {**_QWEN, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "olmoe": {**_QWEN, "model_type": "olmoe", "head_dim": 16, "num_experts": 16, "intermediate_size": 32},
}


def maker(root: Path, others: Callable[..., Path] | None = None) -> Callable[..., Path]:
    """`maker(root)(name, layout)`: the folder of a checkpoint under `root`; with `others` only of this module's own."""

    def make_or_ask(name: str, layout: str = "published") -> Path:
        return others(name, layout) if others is not None and name not in CONFIGS else make(name, root, layout)

    return make_or_ask


def make(name: str, root: Path, layout: str = "published") -> Path:
    """The folder of the checkpoint `name`, of `checkpoints` or of this module."""
    with mock.patch.dict(checkpoints.CONFIGS, CONFIGS):
        return checkpoints.make(name, root, layout)


def edited(
    path: Path, target: Path, edit: Callable[[Tensors], Tensors | None], config: dict[str, Any] | None = None
) -> Path:
    """A copy at `target` of a one-file checkpoint: tensors changed or replaced by `edit`, config entries added."""
    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    save_file(edit(tensors) or tensors, target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **(config or {})}))
    return target


def fp8_pair(path: Path, root: Path) -> tuple[Path, Path]:
    """A checkpoint in block-scaled fp8, and one in fp32 with exactly the values that this one stands for."""
    exact: Tensors = {}

    def quantise(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, value in tensors.items():
            if not name.endswith("_proj.weight"):
                exact[name] = result[name] = value
                continue
            result[name], result[f"{name}_scale_inv"] = _to_fp8(value)
            exact[name] = result[name].float() * _spread(result[f"{name}_scale_inv"], value)
        return result

    quantization = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "activation_scheme": "dynamic"}
    fp8 = edited(path, root / "fp8", quantise, {"quantization_config": quantization})
    return fp8, edited(path, root / "exact", lambda _: exact)


def _to_fp8(value: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // FP8_BLOCK) for size in value.shape)
    scale = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK), slice(column * FP8_BLOCK, (column + 1) * FP8_BLOCK)
            scale[row, column] = value[at].abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (value / _spread(scale, value)).to(torch.float8_e4m3fn), scale


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    """One scale per element of `like`."""
    wide = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return wide[: like.shape[0], : like.shape[1]]
