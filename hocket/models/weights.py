"""What a model expects of a checkpoint: one WeightSpec per published tensor. Knows nothing of files or of reading them.

Legend: E experts, I intermediate width, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from hocket.layers.linear import Fp8Linear, Linear
from hocket.layers.mlp import GatedMLP
from hocket.layers.norm import RMSNorm
from hocket.moe.experts.base import Experts
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.quant import fp8


@dataclass(frozen=True, kw_only=True)
class FusedSource:
    """Where a tensor also may lie: entry `expert` of the stacked tensor `name` [E, rows, columns], `rows` of it."""

    name: str
    shape: tuple[int, int, int]
    expert: int
    rows: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One tensor of a checkpoint as published.

    name, shape: in the checkpoint. target: the view it fills; None: another rank's, its shape is checked but it is not
    read. fused: its place in a stacked tensor, used where the checkpoint has that instead. equal_to: it may be absent,
    and if present must hold what the tensor of this name holds (tied weights).

    module, first_row: whose weight it is part of and where it begins there, if that could be held in fp8 as well.
    scale: of an fp8 target, the view that its block scales fill.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor | None
    fused: FusedSource | None = None
    equal_to: str | None = None
    module: Linear | Experts | None = None
    first_row: int = 0
    scale: Tensor | None = None


def tensor_spec(name: str, target: Tensor) -> WeightSpec:
    """A checkpoint tensor that fills `target` as it is."""
    return WeightSpec(name=name, shape=tuple(target.shape), target=target.detach())


def linear_specs(
    prefix: str, linear: Linear, start: int = 0, stop: int | None = None, *, bias: bool = False, is_called: bool = True
) -> Iterator[WeightSpec]:
    """`prefix`.weight (and .bias), which fill the output rows [start, stop) of `linear`.

    is_called: False where a model reads the weight itself instead, so that it cannot be held in fp8.
    """
    spec = tensor_spec(f"{prefix}.weight", linear.weight[start:stop])
    scale = None
    if isinstance(linear, Fp8Linear):
        scale = linear.scale.detach()[start // fp8.BLOCK : None if stop is None else fp8.blocks(stop)]
    yield replace(spec, module=linear if is_called else None, first_row=start, scale=scale)
    if bias:
        assert linear.bias is not None
        yield tensor_spec(f"{prefix}.bias", linear.bias[start:stop])


def norm_spec(prefix: str, norm: RMSNorm) -> WeightSpec:
    """`prefix`.weight."""
    return tensor_spec(f"{prefix}.weight", norm.weight)


def mlp_specs(prefix: str, mlp: GatedMLP) -> Iterator[WeightSpec]:
    """gate_proj, up_proj and down_proj under `prefix`."""
    width = mlp.down.weight.shape[1]
    yield from linear_specs(f"{prefix}.gate_proj", mlp.gate_up, 0, width)
    yield from linear_specs(f"{prefix}.up_proj", mlp.gate_up, width)
    yield from linear_specs(f"{prefix}.down_proj", mlp.down)


def moe_specs(prefix: str, moe: MoELayer, placement: ExpertPlacement, rank: int) -> Iterator[WeightSpec]:
    """The router, every expert (only those of `rank` have a target) and the shared experts under `prefix`."""
    yield tensor_spec(f"{prefix}.gate.weight", moe.router.weight)
    if moe.router.e_score_correction_bias is not None:
        yield tensor_spec(f"{prefix}.gate.e_score_correction_bias", moe.router.e_score_correction_bias)
    for expert in range(placement.num_experts):
        yield from _expert_specs(f"{prefix}.experts", moe, placement, rank, expert)
    if moe.shared_experts is not None:
        assert isinstance(moe.shared_experts, GatedMLP)
        yield from mlp_specs(f"{prefix}.shared_experts", moe.shared_experts)


def _expert_specs(
    prefix: str, moe: MoELayer, placement: ExpertPlacement, rank: int, expert: int
) -> Iterator[WeightSpec]:
    experts = moe.experts
    hidden, width = experts.w2.shape[1:]
    num_experts = placement.num_experts
    local_idx = placement.local_idx[expert] if placement.rank_of[expert] == rank else None
    mine13, mine2 = (None if local_idx is None else w.detach()[local_idx] for w in (experts.w13, experts.w2))
    scale13 = scale2 = None
    if isinstance(experts, Fp8Experts) and local_idx is not None:
        scale13, scale2 = experts.w13_scale.detach()[local_idx], experts.w2_scale.detach()[local_idx]
    for row, name in ((0, "gate_proj"), (width, "up_proj")):
        yield WeightSpec(
            name=f"{prefix}.{expert}.{name}.weight",
            shape=(width, hidden),
            target=None if mine13 is None else mine13[row : row + width],
            fused=FusedSource(
                name=f"{prefix}.gate_up_proj",
                shape=(num_experts, 2 * width, hidden),
                expert=expert,
                rows=(row, row + width),
            ),
            module=experts,
            first_row=row,
            scale=None if scale13 is None else scale13[row // fp8.BLOCK : (row + width) // fp8.BLOCK],
        )
    yield WeightSpec(
        name=f"{prefix}.{expert}.down_proj.weight",
        shape=(hidden, width),
        target=mine2,
        fused=FusedSource(
            name=f"{prefix}.down_proj", shape=(num_experts, hidden, width), expert=expert, rows=(0, hidden)
        ),
        module=experts,
        scale=scale2,
    )
