"""The plain loop over experts that every other backend is compared with. Reads ids on the host: CPU and tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.moe.experts.base import Experts, silu_and_mul


class ReferenceExperts(Experts):
    """One expert after the other, each on the rows that chose it; sums in the order of local indices."""

    name = "reference"

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local_ids = self.local_ids(ids)
        out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        for expert in range(self.num_local_experts):
            rows, slots = torch.where(local_ids == expert)
            if rows.numel() == 0:
                continue
            hidden = silu_and_mul(F.linear(x[rows], self.w13[expert]))
            result = F.linear(hidden, self.w2[expert])
            out.index_add_(0, rows, result.float() * weights[rows, slots, None])
        return out.to(x.dtype)
