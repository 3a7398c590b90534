"""Which matrices of a layer are held in block-scaled fp8. Knows specs of weights, not files and not models.

A matrix merged from several published ones needs each to begin at a whole block of 128 rows, because a block has one
scale and published blocks begin with their matrix; others, and odd widths, are left to be expanded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hocket.config.model import Fp8BlockConfig
from hocket.layers.linear import Fp8Linear, Linear
from hocket.models.weights import WeightSpec
from hocket.moe.experts.base import Experts
from hocket.moe.factory import MoEFactory
from hocket.quant import fp8


def hold_in_fp8(
    layer: nn.Module, specs: Iterable[WeightSpec], config: Fp8BlockConfig, moe: MoEFactory, dtype: torch.dtype
) -> None:
    """Replace, inside `layer`, the modules of `specs` that can be held in fp8; activations are of `dtype`."""
    specs_of: dict[Linear | Experts, list[WeightSpec]] = {}
    for spec in specs:
        if spec.module is not None:
            specs_of.setdefault(spec.module, []).append(spec)
    for module, own in specs_of.items():
        if any(config.leaves(s.name) or s.first_row % fp8.BLOCK or s.shape[1] % fp8.BLOCK for s in own):
            continue
        held = moe.fp8_experts(module, dtype) if isinstance(module, Experts) else _linear(module, dtype)
        if held is not None:
            _replace(layer, module, held)


def _linear(linear: Linear, dtype: torch.dtype) -> Fp8Linear:
    width, device = linear.weight.shape, linear.weight.device
    return Fp8Linear(width[1], width[0], bias=linear.bias is not None, device=device, dtype=dtype)


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in root.modules():
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
