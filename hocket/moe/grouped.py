"""Rows that stand expert by expert, each expert with so many places, of which the first ones are taken. Knows no
transport and no experts.

Shapes: E local experts, R places of one expert, D hidden, N most rows of all experts together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRows:
    """x [E, R, D]; counts int32 [E]: the first so many places of an expert are rows, what the others hold is undefined
    (NaN too).

    scales: None, or fp32 [E, R, D / 128] where x is e4m3 (`quant/fp8.py`), column by column; for experts that take such
    rows. max_rows: N, from shapes alone; expected_rows: of one expert, were all as popular.
    """

    x: Tensor
    counts: Tensor
    max_rows: int
    expected_rows: float
    scales: Tensor | None = None

    def taken(self) -> tuple[Tensor, Tensor]:
        """(expert, place), both int64 [N]: of each row, in order; past the last one -1 and E · R. place counts through
        all experts. Nothing is read on the host."""
        num_experts, num_places, _ = self.x.shape
        ends = self.counts.cumsum(0)
        row = torch.arange(self.max_rows, device=ends.device)
        expert = torch.searchsorted(ends, row, right=True)
        at = expert.clamp(max=num_experts - 1)
        place = row + at * num_places - (ends - self.counts)[at]
        is_past = row >= ends[-1]
        return expert.masked_fill(is_past, -1), place.masked_fill(is_past, num_experts * num_places)
