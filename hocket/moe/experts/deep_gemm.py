"""Experts through DeepGEMM's grouped GEMMs in bf16, on Hopper. The host waits for nothing.

DeepGEMM compiles a kernel per shape on first use, with nvcc; it reads its own headers and keeps what it compiled.

Shapes: N rows, D hidden, I intermediate, E local experts, K top-k, P places, M places of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.moe.base import check_ids
from hocket.moe.experts import permute
from hocket.moe.experts.base import Experts

WIDTH_MULTIPLE = 64
"""DeepGEMM reads so many columns at a time."""
MASKED_MAX_ROWS = 512
"""Above, places for all N rows at every expert would be too many."""
MASKED_ALIGN = 128
"""The larger of DeepGEMM's tiles there: one that reached past an expert's places would overwrite its neighbour's."""


class DeepGemmExperts(Experts):
    """Up to MASKED_MAX_ROWS rows each expert has places for all of them (masked GEMMs), above experts stand one behind
    the other (contiguous GEMMs). A row names an expert at most once.

    num_sms: how many multiprocessors the GEMMs may take, None for all. A row's slots are summed in their order.
    """

    name = "deep_gemm"
    captures = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_sms: int | None = None

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

    def forward(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        check_ids(local_ids, self.num_local_experts, "local expert ids")
        if local_ids.numel() == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        x = x if x.stride(1) == 1 else x.contiguous()
        if len(x) <= MASKED_MAX_ROWS:
            places, gemm = self._masked(local_ids)
        else:
            places, gemm = self._contiguous(local_ids)
        _limit_sms(self.num_sms)
        gate_up = gemm(permute.scatter_rows(x, places, local_ids.shape[1]), self.w13)
        return permute.gather_sum(gemm(permute.silu_and_mul_rows(gate_up, places), self.w2), places, weights)

    def _masked(self, local_ids: Tensor) -> tuple[permute.Places, Callable[[Tensor, Tensor], Tensor]]:
        import deep_gemm

        num_experts = self.num_local_experts
        most = -(-len(local_ids) // MASKED_ALIGN) * MASKED_ALIGN
        places = permute.masked_places_of(local_ids, num_experts, most)
        expected = max(1, round(self.rows_per_expert(local_ids)))

        def gemm(rows: Tensor, weight: Tensor) -> Tensor:
            out = rows.new_empty(num_experts, most, weight.shape[1])
            grouped = rows.view(num_experts, most, -1)
            deep_gemm.m_grouped_bf16_gemm_nt_masked(grouped, weight, out, places.rows_of_expert, expected)
            return out.view(num_experts * most, -1)

        return places, gemm

    def _contiguous(self, local_ids: Tensor) -> tuple[permute.Places, Callable[[Tensor, Tensor], Tensor]]:
        import deep_gemm

        align = deep_gemm.get_mk_alignment_for_contiguous_layout()
        places = permute.tiles_of(local_ids, self.num_local_experts, align, expert_per_place=True)

        def gemm(rows: Tensor, weight: Tensor) -> Tensor:
            out = rows.new_empty(len(rows), weight.shape[1])
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, weight, out, places.expert_of_tile)
            return out

        return places, gemm


def _limit_sms(num_sms: int | None) -> None:
    """DeepGEMM keeps this number for the process: it is set before every use."""
    import deep_gemm

    deep_gemm.set_num_sms(num_sms or torch.cuda.get_device_properties().multi_processor_count)
