"""Checkpoints to load and models to load them into. For tests only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import paged
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hocket.config.model import ModelConfig
from hocket.dist.mesh import Mesh
from hocket.errors import CheckpointError
from hocket.models.base import CausalLM
from hocket.models.loader import load_weights
from hocket.models.registry import build_model
from hocket.moe.factory import MoEFactory
from hocket.moe.placement import ExpertPlacement

Tensors = dict[str, Tensor]


class RankFactory(MoEFactory):
    """A factory for one rank of several, whose layers are only loaded and never run."""

    def __init__(self, placement: ExpertPlacement, rank: int) -> None:
        alone = ExpertPlacement(placement.num_experts, 1)
        super().__init__(Mesh(rank=0, world_size=1, device=paged.CPU), alone, "local", "reference")
        self.placement, self.rank = placement, rank


def unset(path: Path, factory: MoEFactory | None = None, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The model of the checkpoint with every weight NaN."""
    config = ModelConfig.from_pretrained(path)
    model = build_model(config, factory or paged.one_rank_factory(config), paged.CPU, dtype)
    for value in model.parameters():
        value.fill_(float("nan"))
    return model


def loaded(path: Path, factory: MoEFactory | None = None, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = unset(path, factory, dtype)
    load_weights(model, path)
    return model


def edited(
    path: Path, target: Path, edit: Callable[[Tensors], object], config: dict[str, object] | None = None
) -> Path:
    """A copy of a one-file checkpoint with its tensors (and config.json) changed."""
    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    if config:
        values = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


def failure(path: Path) -> str:
    """The message of the CheckpointError that loading raises, always one line."""
    with pytest.raises(CheckpointError) as caught:
        load_weights(unset(path), path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text
