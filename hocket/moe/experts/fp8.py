"""Experts in block-scaled fp8: DeepGEMM's grouped products on a GPU, the plain loop on a CPU. Knows nothing of ranks.

Shapes: T rows, D hidden, I intermediate, E local experts, K top-k. Formats: quant/fp8.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hocket.moe.base import check_ids, is_on_host
from hocket.moe.experts.base import Experts
from hocket.quant import fp8

if TYPE_CHECKING:
    from hocket.moe.experts.permute import Places

MASKED_ROWS = 16384
"""Up to so many rows, counted as if all T rows chose each of the experts, every expert gets a fixed place for T rows:
no rows are read or computed beyond those that are there. Above it, experts' rows lie one after the other."""
MASKED_STEP = 64
"""A fixed place is a multiple of so many rows."""


class Fp8Experts(Experts):
    """`w13` e4m3 [E, 2I, D] and `w2` e4m3 [E, D, I] with fp32 scales per 128 × 128 block. D and I: multiples of 128.

    Rows are quantised before both products. A row's slots are summed in fp32 in their order.
    """

    name = "deep_gemm_fp8"

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str = "silu",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_local_experts,
            hidden_size,
            intermediate_size,
            hidden_act=hidden_act,
            device=device,
            dtype=fp8.DTYPE,
        )
        self.dtype = dtype or torch.get_default_dtype()
        hidden, width = fp8.blocks(hidden_size), fp8.blocks(intermediate_size)
        for key, shape in (("w13_scale", (2 * width, hidden)), ("w2_scale", (hidden, width))):
            value = torch.empty(num_local_experts, *shape, device=device, dtype=torch.float32)
            self.register_parameter(key, nn.Parameter(value, requires_grad=False))
        self.w13_scale: nn.Parameter
        self.w2_scale: nn.Parameter

    @classmethod
    def unsupported_reason(cls, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> str | None:
        for what, width in (("hidden_size", hidden_size), ("moe_intermediate_size", intermediate_size)):
            if width % fp8.BLOCK:
                return f"fp8 experts need {what} to be a multiple of {fp8.BLOCK}, it is {width}"
        return None

    def forward(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        check_ids(local_ids, self.num_local_experts, "local expert ids")
        if len(x) == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        if is_on_host(x):
            return self._one_by_one(x, local_ids, weights)
        from hocket.moe.experts.permute import gather_sum
        from hocket.quant import kernels

        places, rows_of_group = self._places(local_ids)
        of_slot, num_places = places.place_of_slot, places.num_places
        gate_up = self._product(
            kernels.quantize_to_places(x, of_slot, num_places, rows_of_group), places, self.w13, self.w13_scale
        )
        result = self._product(
            kernels.quantize_gated_places(gate_up, of_slot, rows_of_group), places, self.w2, self.w2_scale
        )
        return gather_sum(result, places, weights)

    def _places(self, local_ids: Tensor) -> tuple[Places, int]:
        """Where each slot's row goes, and how many rows lie together in one group of scales."""
        import deep_gemm

        from hocket.moe.experts.permute import masked_places_of, tiles_of

        of_expert = -(-len(local_ids) // MASKED_STEP) * MASKED_STEP
        if self.num_local_experts * of_expert <= MASKED_ROWS:
            return masked_places_of(local_ids, self.num_local_experts, of_expert), of_expert
        step = deep_gemm.get_mk_alignment_for_contiguous_layout()
        tiles = tiles_of(local_ids, self.num_local_experts, step, expert_per_place=True)
        return tiles, tiles.num_places

    def _product(self, rows: tuple[Tensor, Tensor], places: Places, weight: Tensor, scale: Tensor) -> Tensor:
        """rows: e4m3 [P, in] and their scales [groups, rows of a group, in / 128] → bf16 [P, out]."""
        import deep_gemm

        from hocket.moe.experts.permute import Tiles

        values, scales = rows
        out = values.new_empty(len(values), weight.shape[1], dtype=torch.bfloat16)
        if isinstance(places, Tiles):
            pair = values, scales[0]
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(pair, (weight, scale), out, places.expert_of_tile)
            return out
        num_experts, of_expert = scales.shape[:2]
        num_slots = len(places.place_of_slot)
        expected = min(of_expert, max(1, -(-num_slots // num_experts)))
        deep_gemm.fp8_m_grouped_gemm_nt_masked(
            (values.view(num_experts, of_expert, -1), scales),
            (weight, scale),
            out.view(num_experts, of_expert, -1),
            places.rows_of_expert,
            expected,
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
