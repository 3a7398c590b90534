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
    parts: tuple[Tensor, Tensor, Tensor], x: Tensor, ids: Tensor, weights: Tensor, number: int, dropped: int
) -> None:
    """Fill the parts (x [M, D], ids and number int32 [M, K + 1], weights fp32 [M, K]) of M rows from x [N, D],
    ids [N, K] and weights [N, K], N ≤ M: the rows past N get zeros and ids of `dropped`."""
    row_x, row_ids, row_weights = parts
    num_rows, width = row_x.shape
    if num_rows:
        strides = (
            *row_x.stride(),
            *row_ids.stride(),
            *row_weights.stride(),
            *x.stride(),
            *ids.stride(),
            *weights.stride(),
        )
        launch = _pack_launch(num_rows, x.shape[0], width, weights.shape[1], dropped, strides)
        launch(row_x, row_ids, row_weights, x, ids, weights, changing=(number,))


@launches
def _pack_launch(
    num_rows: int, num_real: int, width: int, top_k: int, dropped: int, strides: tuple[int, ...]
) -> Launch:
    """strides: of rows and within them, of each tensor in order."""
    return Launch(
        _pack,
        (num_rows, max(1, -(-width // BLOCK_COLUMNS))),
        *strides,
        num_real,
        DROPPED=dropped,
        D=width,
        TOP_K=top_k,
        SLOTS=1 << top_k.bit_length(),
        ALIGN=math.gcd(strides[0], strides[6], 16),
        BLOCK=BLOCK_COLUMNS,
    )


@triton.jit(do_not_specialize=["number"])
def _pack(
    row_x,
    row_ids,
    row_weights,
    x,
    ids,
    weights,
    number,
    row_x_stride,
    row_x_step,
    row_ids_stride,
    row_ids_step,
    row_weights_stride,
    row_weights_step,
    x_stride,
    x_step,
    ids_stride,
    ids_step,
    weights_stride,
    weights_step,
    num_rows,
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
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + tl.multiple_of(row * x_stride, ALIGN) + cols * x_step, mask=is_real & (cols < D), other=0.0)
    tl.store(row_x + tl.multiple_of(row * row_x_stride, ALIGN) + cols * row_x_step, values, mask=cols < D)
    if tl.program_id(1) == 0:
        slots = tl.arange(0, SLOTS)
        is_slot = slots < TOP_K
        chosen = tl.load(ids + row * ids_stride + slots * ids_step, mask=is_real & is_slot, other=DROPPED)
        chosen = tl.where(is_slot, chosen.to(tl.int32), number)
        tl.store(row_ids + row * row_ids_stride + slots * row_ids_step, chosen, mask=slots <= TOP_K)
        scale = tl.load(weights + row * weights_stride + slots * weights_step, mask=is_real & is_slot, other=0.0)
        tl.store(row_weights + row * row_weights_stride + slots * row_weights_step, scale, mask=is_slot)
