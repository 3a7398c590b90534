"""Experts as two grouped GEMMs over rows sorted by expert. Off the CPU nothing here makes the host wait in bf16.

Shapes: T rows, D hidden, I intermediate, E local experts, K top-k, N computed (row, slot) pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.moe.base import is_on_host
from hocket.moe.experts.base import Experts, silu_and_mul

STRIDE_BYTES = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GroupedMMExperts(Experts):
    """`torch.nn.functional.grouped_mm`. A row's slots are summed in an order that the rest of the batch cannot change:
    on a CPU by expert, elsewhere by slot."""

    name = "grouped_mm"
    captures = True

    @classmethod
    def unsupported_reason(cls, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> str | None:
        if dtype not in DTYPES:
            return f"grouped_mm does not take {dtype}"
        step = STRIDE_BYTES // dtype.itemsize
        for what, width in (("hidden_size", hidden_size), ("moe_intermediate_size", intermediate_size)):
            if width % step:
                return f"grouped_mm needs {what} to be a multiple of {step} in {dtype}, it is {width}"
        return None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local_ids = self.local_ids(ids)
        num_rows, top_k = local_ids.shape
        if num_rows == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        pairs, offs, is_past = self._sort(local_ids)
        rows = pairs // top_k
        hidden = silu_and_mul(F.grouped_mm(x[rows], self.w13.transpose(1, 2), offs=offs))
        result = F.grouped_mm(hidden, self.w2.transpose(1, 2), offs=offs).float()
        result *= weights.flatten()[pairs, None]
        if is_past is None:
            return result.new_zeros(x.shape).index_add_(0, rows, result).to(x.dtype)
        # Elsewhere index_add_ has no fixed order, and what lies past the last expert's end was never written.
        result.masked_fill_(is_past[:, None], 0.0)
        slots = torch.empty_like(result).index_copy_(0, pairs, result)
        return slots.view(num_rows, top_k, -1).sum(dim=1).to(x.dtype)

    def _sort(self, local_ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Order the (row, slot) pairs of local_ids [T, K] by expert, skipped ones last.

        Returns (flat indices [N] into T · K, each expert's end int32 [E], bool [N] marking skipped pairs). On a CPU N
        counts computed pairs only and the mark is None; elsewhere the host cannot know that count, and N = T · K.
        """
        num_experts = self.num_local_experts
        flat = local_ids.flatten()
        expert, pairs = flat.masked_fill(flat < 0, num_experts).sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(num_experts, device=flat.device), right=True, out_int32=True)
        if is_on_host(flat):
            return pairs[: int(ends[-1])], ends, None
        return pairs, ends, expert == num_experts
