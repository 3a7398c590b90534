"""Sums of what ranks computed for the same rows, in fp32 in rank order. Knows no transport.

Shapes: n ranks, P rows of each, N ≤ P rows wanted, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_ranks(own: Tensor, parts: Tensor, rank: int, num_rows: int) -> Tensor:
    """own [P, D]: this rank's part; parts [n, P, D]: of the others, of which [rank] is not read → [N, D] in own's
    dtype, rounded once."""
    if own.is_cuda:
        from hocket.moe.transport import rank_sum_kernels

        out = torch.empty(num_rows, own.shape[1], device=own.device, dtype=own.dtype)
        rank_sum_kernels.add_ranks(out, own, parts, rank)
        return out
    total = torch.zeros(num_rows, own.shape[1], device=own.device, dtype=torch.float32)
    for i, part in enumerate(parts):
        total += (own if i == rank else part)[:num_rows].float()
    return total.to(own.dtype)
