"""Experts whose result for a row is the same to the last bit, whatever other rows the batch has.

Shapes: T rows, D hidden, I intermediate, E local experts, K top-k, N computed (row, slot) pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.layers.kernels import TiledKernels
from hocket.moe.experts.base import Experts


class TiledExperts(Experts):
    """One expert after the other, each over whole tiles of rows; a row's slots are summed in their order."""

    name = "tiled"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernels = TiledKernels()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local_ids = self.local_ids(ids)
        num_rows, top_k = local_ids.shape
        if num_rows == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        expert, pairs = local_ids.flatten().sort(stable=True)  # dropped ones, -1, come first
        ends = torch.searchsorted(expert, torch.arange(-1, self.num_local_experts, device=x.device), right=True)
        num_dropped, *of_experts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        pairs = pairs[num_dropped:]
        gate, up = self._by_expert(x[pairs // top_k], self.w13, of_experts).chunk(2, dim=-1)
        result = self._by_expert(self._kernels.silu(gate) * up, self.w2, of_experts).float()
        slots = result.new_zeros(num_rows * top_k, x.shape[1]).index_copy_(0, pairs, result)
        slots = slots.view(num_rows, top_k, -1)
        slots *= weights.masked_fill(local_ids < 0, 0.0)[..., None]
        out = slots[:, 0]
        for slot in range(1, top_k):
            out = out + slots[:, slot]
        return out.to(x.dtype)

    def _by_expert(self, x: Tensor, weight: Tensor, num_rows: list[int]) -> Tensor:
        """x [N, in], rows of each expert together; weight [E, out, in] → [N, out]."""
        parts = zip(torch.split(x, num_rows), weight, strict=True)
        return torch.cat(
            [self._kernels.linear(part, matrix) for part, matrix in parts if len(part)]
            or [x.new_zeros(0, weight.shape[1])]
        )
