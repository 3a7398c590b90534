"""Experts in block-scaled fp8: DeepGEMM's grouped products on a GPU, the plain loop on a CPU. Knows nothing of ranks.

Shapes: T rows, D hidden, I intermediate, E local experts, K top-k. Formats: quant/fp8.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.moe.base import is_on_host
from hocket.moe.experts import permute
from hocket.moe.experts.base import Experts
from hocket.moe.experts.deep_gemm import masked_rows, places_of, places_of_groups
from hocket.moe.grouped import GroupedRows
from hocket.quant import fp8

MASKED_ROWS = 16384
"""Up to so many rows, counted as if all T rows chose each of the experts, every expert gets a fixed place for T rows:
no rows are read or computed beyond those that are there. Above it, experts' rows lie one after the other."""


class Fp8Experts(Experts):
    """`w13` e4m3 [E, 2I, D] and `w2` e4m3 [E, D, I] with fp32 scales per 128 × 128 block. D and I: multiples of 128.

    Rows are quantised before both products. A row's slots are summed in fp32 in their order; it names an expert at most
    once.
    """

    name = "deep_gemm_fp8"
    captures = True
    takes_fp8_rows = True

    def __init__(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(*args, dtype=fp8.DTYPE, **kwargs)
        self.dtype = dtype or torch.get_default_dtype()
        num_experts, hidden_size, intermediate_size = self.w2.shape
        hidden, width = fp8.blocks(hidden_size), fp8.blocks(intermediate_size)
        for key, shape in (("w13_scale", (2 * width, hidden)), ("w2_scale", (hidden, width))):
            value = torch.empty(num_experts, *shape, device=self.w2.device, dtype=torch.float32)
            self.register_parameter(key, nn.Parameter(value, requires_grad=False))
        self.w13_scale: nn.Parameter
        self.w2_scale: nn.Parameter

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.check_ids(ids)
        if len(x) == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        if is_on_host(x):
            return self._one_by_one(x, self.local_ids(ids), weights)
        from hocket.quant import kernels

        places, rows_of_group = self._places(ids)
        of_slot, expected = places.place_of_slot, max(1, round(self.rows_per_expert(ids)))
        rows = kernels.quantize_to_places(x, of_slot, places.num_places, rows_of_group)
        gate_up = self._product(rows, places, self.w13, self.w13_scale, expected)
        rows = kernels.quantize_gated_places(gate_up, of_slot, rows_of_group)
        return permute.gather_sum(self._product(rows, places, self.w2, self.w2_scale, expected), places, weights)

    def forward_grouped(self, rows: GroupedRows) -> Tensor:
        if is_on_host(rows.x) or self.num_local_experts == 0 or rows.max_rows == 0:
            return super().forward_grouped(_expanded(rows, self.dtype))
        from hocket.quant import kernels

        num_experts, of_expert, hidden_size = rows.x.shape
        places, expected = places_of_groups(rows), max(1, round(rows.expected_rows))
        of_slot, flat = places.place_of_slot, rows.x.view(-1, hidden_size)
        if rows.scales is None:
            quantised = kernels.quantize_to_places(flat[of_slot.clamp(min=0)], of_slot, places.num_places, of_expert)
        else:
            quantised = flat, rows.scales
        gate_up = self._product(quantised, places, self.w13, self.w13_scale, expected)
        quantised = kernels.quantize_gated_places(gate_up, of_slot, of_expert)
        out = self._product(quantised, places, self.w2, self.w2_scale, expected)
        return out.view(num_experts, of_expert, hidden_size)

    def _places(self, ids: Tensor) -> tuple[permute.Places, int]:
        """Where each slot's row goes, and how many rows lie together in one group of scales."""
        of_expert = masked_rows(len(ids))
        is_masked = self.num_local_experts * of_expert <= MASKED_ROWS
        places = places_of(ids, self.num_local_experts, self.local_id_of, is_masked=is_masked)
        return places, of_expert if is_masked else places.num_places

    def _product(
        self, rows: tuple[Tensor, Tensor], places: permute.Places, weight: Tensor, scale: Tensor, expected_rows: int
    ) -> Tensor:
        """rows: e4m3 [P, in] and their scales [groups, rows of a group, in / 128] → bf16 [P, out]."""
        import deep_gemm

        values, scales = rows
        out = values.new_empty(len(values), weight.shape[1], dtype=torch.bfloat16)
        if isinstance(places, permute.Tiles):
            pair = values, scales[0]
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(pair, (weight, scale), out, places.expert_of_tile)
            return out
        num_experts, of_expert = scales.shape[:2]
        deep_gemm.fp8_m_grouped_gemm_nt_masked(
            (values.view(num_experts, of_expert, -1), scales),
            (weight, scale),
            out.view(num_experts, of_expert, -1),
            places.rows_of_expert,
            expected_rows,
        )
        return out

    def _one_by_one(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        for expert in range(self.num_local_experts):
            rows, slots = torch.where(local_ids == expert)
            gate_up = fp8.reference_linear(x[rows], self.w13[expert], self.w13_scale[expert])
            result = fp8.gated_linear(gate_up, self.w2[expert], self.w2_scale[expert])
            out.index_add_(0, rows, result.float() * weights[rows, slots, None])
        return out.to(x.dtype)


def _expanded(rows: GroupedRows, dtype: torch.dtype) -> GroupedRows:
    """The same rows in `dtype`, whether they came in fp8 or not."""
    if rows.scales is None:
        return rows
    x = fp8.expand_rows(rows.x.flatten(0, 1), rows.scales.flatten(0, 1)).view(rows.x.shape)
    return replace(rows, x=x.to(dtype), scales=None)
