"""What both of DeepEP's transports send: rows as its kernels take them. Knows no kernels.

Shapes: T rows, D hidden, K top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hocket.moe.base import DROPPED
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Tokens


@dataclass(frozen=True, slots=True)
class Outgoing:
    """x [T, D], ids [T, K] of `id_dtype` (DeepEP's numbers) and weights fp32 [T, K], all contiguous, with T at least 1:
    a rank without rows sends one that goes nowhere. num_rows: those that there are."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    num_rows: int

    @classmethod
    def of(cls, x: Tensor, ids: Tensor, weights: Tensor, numbers: Tensor | None, id_dtype: torch.dtype) -> Outgoing:
        """ids int64 [T, K] as the router chose them; numbers: see `Numbering.to_numbers`."""
        num_rows = len(x)
        if num_rows == 0:
            x, weights = x.new_zeros(1, x.shape[1]), weights.new_zeros(1, weights.shape[1])
            ids = ids.new_full((1, ids.shape[1]), DROPPED)
        if numbers is not None:
            ids = numbers[ids]
        return cls(x.contiguous(), ids.to(id_dtype).contiguous(), weights.contiguous(), num_rows)


def rows_for_others(num_rows: int, placement: ExpertPlacement, top_k: int, rank: int) -> int:
    """How many rows a rank sends to others on average, each once to a rank with one of its experts, were all experts as
    popular: which are wanted where, only the device knows."""
    return round(num_rows * _ranks_for_others(placement, top_k, rank))


@cache
def _ranks_for_others(placement: ExpertPlacement, top_k: int, rank: int) -> float:
    """To how many other ranks a row goes on average: for each, the chance that not all its experts are elsewhere."""
    experts, choices = placement.num_experts, math.comb(placement.num_experts, top_k)
    others = (len(placement.experts_of(other)) for other in range(placement.num_ranks) if other != rank)
    return sum(1.0 - math.comb(experts - held, top_k) / choices for held in others)


def slots_for_others(num_rows: int, placement: ExpertPlacement, top_k: int, rank: int) -> int:
    """The same of slots: a row travels once for each of its experts."""
    here = len(placement.experts_of(rank))
    return round(num_rows * top_k * (placement.num_experts - here) / placement.num_experts)


def ranks_of(tokens: Tokens) -> list[list[int]]:
    """Of each token, the rank of each of its experts."""
    rank_of = tokens.placement.rank_of
    return [[rank_of[expert] for expert in row if expert >= 0] for row in tokens.ids.tolist()]
