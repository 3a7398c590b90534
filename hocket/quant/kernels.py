"""Triton kernels that quantise rows to fp8, and their launches. Imported only where Triton is. Knows no layer.

Legend: T rows, K width, G = K / 128 blocks of a row, S slots (several per row), P places that slots' rows go to.
Grids depend on shapes alone, so launches can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches
from hocket.quant.fp8 import BLOCK, DTYPE, LARGEST, SCALE_ROWS, SMALLEST_MAX, blocks, empty_row_scales

GROUPS = 8
"""Blocks of a row that one program quantises."""
_CONSTANTS = {"groups": GROUPS, "block": BLOCK, "smallest": SMALLEST_MAX, "largest": LARGEST}


@triton.jit
def scaled(values, smallest: tl.constexpr, largest: tl.constexpr):
    """values fp32 [groups, 128] → (values over the scale, scale [groups])."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), smallest) * (1.0 / largest)
    return values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None], scale


@triton.jit
def silu_mul(gate, up):
    """silu(gate) · up in fp32."""
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def _quantize_rows(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    scale_stride,
    num_groups,
    is_gated: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    smallest: tl.constexpr,
    largest: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    is_group = group < num_groups
    column = group[:, None] * block + tl.arange(0, block)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=is_group[:, None], other=0.0).to(tl.float32)
    if is_gated:
        up = tl.load(x_ptr + row * x_stride + num_groups * block + column, mask=is_group[:, None], other=0.0)
        x = silu_mul(x, up)
    values, scale = scaled(x, smallest, largest)
    tl.store(out_ptr + row * num_groups * block + column, values.to(out_ptr.dtype.element_ty), mask=is_group[:, None])
    tl.store(scale_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=is_group)


@triton.jit
def _quantize_to_places(
    x_ptr,
    place_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    num_groups,
    rows_of_group,
    is_gated: tl.constexpr,
    slots: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    smallest: tl.constexpr,
    largest: tl.constexpr,
):
    """Row r of x to the places of its `slots` slots; is_gated: gate and up that lie at the place of slot r to there."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    is_group = group < num_groups
    column = group[:, None] * block + tl.arange(0, block)[None, :]
    if is_gated:
        place = tl.load(place_ptr + row).to(tl.int64)
        mask = is_group[:, None] & (place >= 0)
        gate = tl.load(x_ptr + place * x_stride + column, mask=mask, other=0.0)
        x = silu_mul(gate, tl.load(x_ptr + place * x_stride + num_groups * block + column, mask=mask, other=0.0))
    else:
        x = tl.load(x_ptr + row * x_stride + column, mask=is_group[:, None], other=0.0).to(tl.float32)
    values, scale = scaled(x, smallest, largest)
    values = values.to(out_ptr.dtype.element_ty)
    for slot in tl.static_range(slots):
        place = tl.load(place_ptr + row * slots + slot).to(tl.int64)
        is_taken = is_group & (place >= 0)
        tl.store(out_ptr + place * num_groups * block + column, values, mask=is_taken[:, None])
        first = (place // rows_of_group * num_groups + group) * rows_of_group
        tl.store(scale_ptr + first + place % rows_of_group, scale, mask=is_taken)


def quantize_to_places(x: Tensor, place_of_slot: Tensor, num_places: int, rows_of_group: int) -> tuple[Tensor, Tensor]:
    """x [T, K] quantised, each row at the places of its S / T slots: int32 [S], -1 none, no place twice.

    Returns e4m3 [P, K] and fp32 scales [P / rows_of_group, rows_of_group, G], in each group column by column.
    rows_of_group: a multiple of 4 that divides P. What lies at other places is not set.
    """
    return _launch_places(x, place_of_slot, num_places, rows_of_group, is_gated=False)


def quantize_gated_places(gate_up: Tensor, place_of_slot: Tensor, rows_of_group: int) -> tuple[Tensor, Tensor]:
    """`quantize_to_places` of silu(gate) · up of gate_up [P, 2K], in place for place."""
    return _launch_places(gate_up, place_of_slot, len(gate_up), rows_of_group, is_gated=True)


def _launch_places(
    x: Tensor, place_of_slot: Tensor, num_places: int, rows_of_group: int, *, is_gated: bool
) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == 1, "the numbers of a row must lie together"
    assert num_places % rows_of_group == 0, (num_places, rows_of_group)
    assert rows_of_group % SCALE_ROWS == 0, rows_of_group
    width = x.shape[1] // 2 if is_gated else x.shape[1]
    assert width % BLOCK == 0, f"{width} columns are not whole blocks of {BLOCK}"
    num_rows, num_groups = (len(place_of_slot) if is_gated else len(x)), blocks(width)
    out = torch.empty(num_places, width, device=x.device, dtype=DTYPE)
    shape = num_places // rows_of_group, num_groups, rows_of_group
    scales = torch.empty(shape, device=x.device, dtype=torch.float32)
    if num_rows:
        slots = len(place_of_slot) // num_rows
        launch = _places_launch(num_rows, num_groups, x.stride(0), rows_of_group, is_gated, slots)
        launch(x, place_of_slot, out, scales)
    return out, scales.transpose(1, 2)


@launches
def _places_launch(
    num_rows: int, num_groups: int, stride: int, rows_of_group: int, is_gated: bool, slots: int
) -> Launch:
    grid = num_rows, triton.cdiv(num_groups, GROUPS)
    numbers = stride, num_groups, rows_of_group
    return Launch(_quantize_to_places, grid, *numbers, is_gated=is_gated, slots=slots, **_CONSTANTS)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.quantize_rows` in one launch. x [T, K]: rows may lie apart, numbers of a row not."""
    return _launch(x, x.shape[1], is_gated=False)


def quantize_gated_rows(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.quantize_rows` of silu(gate) · up (computed in fp32, not rounded in between), gate_up [T, 2K]."""
    return _launch(gate_up, gate_up.shape[1] // 2, is_gated=True)


def _launch(x: Tensor, width: int, *, is_gated: bool) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == 1, "the numbers of a row must lie together"
    assert width % BLOCK == 0, f"{width} columns are not whole blocks of {BLOCK}"
    num_rows, num_groups = x.shape[0], blocks(width)
    out = torch.empty(num_rows, width, device=x.device, dtype=DTYPE)
    scales = empty_row_scales(num_rows, width, x.device)
    if num_rows:
        _rows_launch(num_rows, num_groups, x.stride(0), scales.stride(1), is_gated)(x, out, scales)
    return out, scales


@launches
def _rows_launch(num_rows: int, num_groups: int, stride: int, scale_stride: int, is_gated: bool) -> Launch:
    grid = num_rows, triton.cdiv(num_groups, GROUPS)
    return Launch(_quantize_rows, grid, stride, scale_stride, num_groups, is_gated=is_gated, **_CONSTANTS)
