"""Faults in one layer, beside those of `overlap_faults`, for `hocket verify` to find. For tests only; ranks call
`install` at their start.
"""

from __future__ import annotations

from typing import Any

import faults
from faults import Plant, model_of
from model_faults import moe_of
from overlap_faults import OVERLAP_FAULTS
from overlap_transfer_faults import MOCKS, ubatch_idx
from torch import Tensor

from hocket.engine import Engine
from hocket.layers.mlp import GatedMLP

A_LITTLE = 1.3


def weigh_twice_in_one_layer(engine: Engine) -> None:
    """In ubatches one layer's experts apply the combine weights and apply them again."""

    def again(_module: Any, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, ids, weights = args
        return x, ids, weights * weights if ubatch_idx() is not None else weights

    moe_of(model_of(engine)).experts.register_forward_pre_hook(again)


def weigh_a_little_more(engine: Engine) -> None:
    """In ubatches one layer's experts weigh a little more: no token is far off, but all are."""

    def more(_module: Any, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, ids, weights = args
        return x, ids, weights * A_LITTLE if ubatch_idx() is not None else weights

    moe_of(model_of(engine)).experts.register_forward_pre_hook(more)


def share_a_workspace(engine: Engine) -> None:
    """One layer's shared experts write to one buffer for all ubatches, which alternate before anyone has read it."""
    shared = moe_of(model_of(engine)).shared_experts
    assert isinstance(shared, GatedMLP)
    kept: list[Tensor] = []

    def into_buffer(_module: Any, _args: Any, out: Tensor) -> Tensor:
        if ubatch_idx() is None:
            return out
        if not kept:
            kept.append(out.new_zeros(4096, out.shape[1]))
        rows = kept[0][: len(out)]
        rows.copy_(out)
        return rows

    shared.register_forward_hook(into_buffer)


def raise_in_one_layer(engine: Engine) -> None:
    """One layer's shared experts fail in the second ubatch."""

    def fail(_module: Any, _args: Any) -> None:
        if ubatch_idx() == 1:
            raise ValueError("planted")

    shared = moe_of(model_of(engine)).shared_experts
    assert isinstance(shared, GatedMLP)
    shared.register_forward_pre_hook(fail)


FAULTS: dict[str, Plant] = {
    "weights applied twice in one layer": weigh_twice_in_one_layer,
    "weights a little larger in one layer": weigh_a_little_more,
    "one workspace in one layer": share_a_workspace,
    "the second ubatch raises": raise_in_one_layer,
}


def install() -> None:
    """As `overlap_faults.install`, with what is here."""
    faults.install_from(OVERLAP_FAULTS | FAULTS, before=MOCKS.close)
