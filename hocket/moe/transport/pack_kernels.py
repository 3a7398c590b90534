"""Triton kernels that write and read rows of bytes (`rows.py`) on a GPU, one launch each. Know no layout: they are
given the views of its parts.

Shapes: N rows, M rows written, D hidden, K top-k.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches

BLOCK_COLUMNS = 1024


def pack(
    rows: Tensor, ids_at: int, weights_at: int, x: Tensor, ids: Tensor, weights: Tensor, number: int, dropped: int
) -> None:
    """Fill `rows` uint8 [M, bytes] from x [N, D], ids [N, K] and weights [N, K], N ≤ M: the rows past N get zeros and
    ids of `dropped`. At byte 0 of a row x begins, at ids_at ids and number (int32), at weights_at weights (fp32)."""
    num_rows, row_bytes = rows.shape
    if num_rows:
        places = row_bytes, ids_at, weights_at
        strides = *x.stride(), *ids.stride(), *weights.stride()
        _pack_launch(num_rows, *x.shape, weights.shape[1], x.element_size(), dropped, places, strides)(
            rows, x, ids, weights, changing=(number,)
        )


@launches
def _pack_launch(
    num_rows: int,
    num_real: int,
    width: int,
    top_k: int,
    itemsize: int,
    dropped: int,
    places: tuple[int, int, int],
    strides: tuple[int, ...],
) -> Launch:
    """places: bytes of a row, and where in it ids and weights begin; strides: of x, ids and weights, of rows and within
    them."""
    row_bytes, ids_at, weights_at = places
    return Launch(
        _pack,
        (num_rows, max(1, -(-width // BLOCK_COLUMNS))),
        *strides,
        num_real,
        ROW_BYTES=row_bytes,
        ROW_ITEMS=row_bytes // itemsize,
        IDS_AT=ids_at,
        WEIGHTS_AT=weights_at,
        DROPPED=dropped,
        D=width,
        TOP_K=top_k,
        SLOTS=1 << top_k.bit_length(),
        ALIGN=math.gcd(row_bytes // itemsize, strides[0], 16),
        BLOCK=BLOCK_COLUMNS,
    )


@triton.jit(do_not_specialize=["number"])
def _pack(
    rows,
    x,
    ids,
    weights,
    number,
    x_stride,
    x_step,
    ids_stride,
    ids_step,
    weights_stride,
    weights_step,
    num_rows,
    ROW_BYTES: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    DROPPED: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a block of columns of one row; the first of a row also writes ids, number and weights."""
    row = tl.program_id(0).to(tl.int64)
    is_real = row < num_rows
    start = rows + row * ROW_BYTES
    row_x = rows.to(tl.pointer_type(x.dtype.element_ty)) + tl.multiple_of(row * ROW_ITEMS, ALIGN)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + tl.multiple_of(row * x_stride, ALIGN) + cols * x_step, mask=is_real & (cols < D), other=0.0)
    tl.store(row_x + cols, values, mask=cols < D)
    if tl.program_id(1) == 0:
        slots = tl.arange(0, SLOTS)
        is_slot = slots < TOP_K
        chosen = tl.load(ids + row * ids_stride + slots * ids_step, mask=is_real & is_slot, other=DROPPED)
        chosen = tl.where(is_slot, chosen.to(tl.int32), number)
        tl.store((start + IDS_AT).to(tl.pointer_type(tl.int32)) + slots, chosen, mask=slots <= TOP_K)
        scale = tl.load(weights + row * weights_stride + slots * weights_step, mask=is_real & is_slot, other=0.0)
        tl.store((start + WEIGHTS_AT).to(tl.pointer_type(tl.float32)) + slots, scale, mask=is_slot)
