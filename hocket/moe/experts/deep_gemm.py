"""Experts through DeepGEMM's grouped GEMMs in bf16, on Hopper. The host waits for nothing.

DeepGEMM compiles a kernel per shape on first use, with nvcc; it reads its own headers and keeps what it compiled.

Shapes: N rows, D hidden, I intermediate, E local experts, K top-k, P places, M places of one expert.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hocket.moe.experts import groups, permute
from hocket.moe.experts.base import Experts
from hocket.moe.grouped import GroupedRows

WIDTH_MULTIPLE = 64
"""DeepGEMM reads so many columns at a time."""
MASKED_MAX_ROWS = 512
"""Up to so many rows, places for all of them at every expert are few enough in any case."""
MASKED_ALIGN = 128
"""The larger of DeepGEMM's tiles there: one that reached past an expert's places would overwrite its neighbour's."""


class DeepGemmExperts(Experts):
    """Each expert has places for all rows (masked GEMMs) where these are few, or no more than there are slots; else
    experts stand one behind the other (contiguous GEMMs). Places that nothing stands at are not multiplied in either:
    slots of other ranks' experts leave most of them empty. Rows that come expert by expert are taken as they lie. A row
    names an expert at most once; its slots are summed in their order.
    """

    name = "deep_gemm"
    captures = True

    @classmethod
    def unsupported_reason(cls, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> str | None:
        if dtype != torch.bfloat16:
            return f"deep_gemm experts take bfloat16, not {dtype}"
        for what, width in (("hidden_size", hidden_size), ("moe_intermediate_size", intermediate_size)):
            if width % WIDTH_MULTIPLE:
                return f"deep_gemm needs {what} to be a multiple of {WIDTH_MULTIPLE}, it is {width}"
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            return "deep_gemm experts need a Hopper GPU (compute capability 9)"
        return None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.check_ids(ids)
        if ids.numel() == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        x = x if x.stride(1) == 1 else x.contiguous()
        places = places_of(
            ids, self.num_local_experts, self.local_id_of, is_masked=self._is_masked(*ids.shape), told="ends"
        )
        expected = max(1, round(self.rows_per_expert(ids)))
        gate_up = self._product(permute.scatter_rows(x, places, ids.shape[1]), places, self.w13, expected)
        hidden = permute.silu_and_mul_rows(gate_up, places)
        return permute.gather_sum(self._product(hidden, places, self.w2, expected), places, weights)

    def _is_masked(self, num_rows: int, top_k: int) -> bool:
        most = max(self.num_local_experts * MASKED_MAX_ROWS, num_rows * top_k)
        return self.num_local_experts * masked_rows(num_rows) <= most

    def forward_grouped(self, rows: GroupedRows) -> Tensor:
        num_experts, of_expert, hidden_size = rows.x.shape
        if num_experts == 0 or rows.max_rows == 0:
            return rows.x.new_empty(rows.x.shape)
        places, expected = places_of_groups(rows), max(1, round(rows.expected_rows))
        gate_up = self._product(rows.x.view(-1, hidden_size), places, self.w13, expected)
        hidden = permute.silu_and_mul_rows(gate_up, places)
        return self._product(hidden, places, self.w2, expected).view(num_experts, of_expert, -1)

    def _product(self, rows: Tensor, places: permute.Places, weight: Tensor, expected_rows: int) -> Tensor:
        """rows [P, in] → [P, out]."""
        import deep_gemm

        out = rows.new_empty(len(rows), weight.shape[1])
        if isinstance(places, permute.Tiles):
            ends = places.expert_of_tile
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, weight, out, ends, use_psum_layout=True)
            return out
        grouped, grouped_out = (x.view(self.num_local_experts, -1, x.shape[1]) for x in (rows, out))
        deep_gemm.m_grouped_bf16_gemm_nt_masked(grouped, weight, grouped_out, places.rows_of_expert, expected_rows)
        return out


def places_of(
    ids: Tensor,
    num_experts: int,
    local_id_of: Tensor | None,
    *,
    is_masked: bool,
    told: Literal["places", "ends"] = "places",
) -> permute.Places:
    """Where DeepGEMM's products want each slot's row: is_masked: in places for all rows at every expert, else experts
    one behind the other, as Tiles that tell `told`. ids as in `permute.tiles_of`, each row with an expert at most
    once."""
    if is_masked:
        return permute.masked_places_of(ids, num_experts, masked_rows(len(ids)), local_id_of)
    import deep_gemm

    step = deep_gemm.get_mk_alignment_for_contiguous_layout()
    return permute.tiles_of(ids, num_experts, step, local_id_of, told=told)


def places_of_groups(rows: GroupedRows) -> permute.Places:
    """Where the rows stand already. Raises where an expert's places are no whole tiles."""
    of_expert = rows.x.shape[1]
    assert of_expert % MASKED_ALIGN == 0, f"{of_expert} places of an expert are not whole tiles of {MASKED_ALIGN}"
    return groups.places_of_groups(rows)


def masked_rows(num_rows: int) -> int:
    """Places of one expert in the masked layout."""
    return -(-num_rows // MASKED_ALIGN) * MASKED_ALIGN
