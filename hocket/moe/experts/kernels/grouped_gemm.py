"""Triton kernels of two grouped GEMMs over tiles of rows, each tile of one expert. Know nothing of routing.

Both are persistent: program p of n computes blocks p, p + n, … of the output. Rows of a tile past
its number are computed from whatever is there and not stored.

Shapes: N rows, K top-k, D hidden, I intermediate, E local experts, P places (tiles · BLOCK_M).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(work, num_tiles, num_columns, GROUP: tl.constexpr):
    """Number of a block → (tile, block of columns): down GROUP tiles first, so that they share weights in the L2."""
    per_group = GROUP * num_columns
    first = work // per_group * GROUP
    height = tl.minimum(num_tiles - first, GROUP)
    inside = work % per_group
    return first + inside % height, inside // height


@triton.jit
def _load(pointers, offset, k, K_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block [rows, BLOCK_K] from column `offset`; zeros past K_SIZE."""
    if K_SIZE % BLOCK_K == 0:
        return tl.load(pointers + offset)
    return tl.load(pointers + offset, mask=(k + offset < K_SIZE)[None, :], other=0.0)


@triton.jit
def gate_up(
    x,
    w13,
    hidden,
    slot_of_place,
    expert_of_tile,
    rows_of_tile,
    num_tiles,
    x_stride,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    INTER: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """silu(x · gateᵀ) · (x · upᵀ): x [N, D] (x_stride, a multiple of ALIGN, apart), w13 [E, 2 I, D] → hidden [P, I].

    A place's row of x is that of its slot; gate and up of the same columns are computed together.
    """
    tiles = tl.load(num_tiles)
    columns: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    lanes = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for work in range(tl.program_id(0), tiles * columns, tl.num_programs(0)):
        tile, column = _block(work, tiles, columns, GROUP)
        expert = tl.load(expert_of_tile + tile).to(tl.int64)
        is_row = lanes < tl.load(rows_of_tile + tile)
        places = tile * BLOCK_M + lanes
        slots = tl.load(slot_of_place + places, mask=is_row, other=0)
        starts = tl.multiple_of((slots // TOP_K).to(tl.int64) * x_stride, [ALIGN])
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_rows = tl.minimum(cols, INTER - 1)
        x_block = x + starts[:, None] + k[None, :]
        gate_block = w13 + expert * (2 * INTER * D) + weight_rows[:, None] * D + k[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for offset in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            rows = _load(x_block, offset, k, D, BLOCK_K)
            gate_weight = _load(gate_block, offset, k, D, BLOCK_K)
            up_weight = _load(gate_block + INTER * D, offset, k, D, BLOCK_K)
            gate = tl.dot(rows, gate_weight.T, gate, input_precision="ieee")
            up = tl.dot(rows, up_weight.T, up, input_precision="ieee")
        result = (gate / (1.0 + tl.exp(-gate)) * up).to(hidden.dtype.element_ty)
        out = hidden + places[:, None].to(tl.int64) * INTER + cols[None, :]
        tl.store(out, result, mask=is_row[:, None] & (cols < INTER)[None, :])


@triton.jit
def down(
    hidden,
    w2,
    out,
    expert_of_tile,
    rows_of_tile,
    num_tiles,
    D: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """hidden [P, I], w2 [E, D, I] → out [P, D]."""
    tiles = tl.load(num_tiles)
    columns: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    lanes = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for work in range(tl.program_id(0), tiles * columns, tl.num_programs(0)):
        tile, column = _block(work, tiles, columns, GROUP)
        expert = tl.load(expert_of_tile + tile).to(tl.int64)
        is_row = lanes < tl.load(rows_of_tile + tile)
        places = (tile * BLOCK_M + lanes).to(tl.int64)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_rows = tl.minimum(cols, D - 1)
        hidden_block = hidden + places[:, None] * INTER + k[None, :]
        weight_block = w2 + expert * (D * INTER) + weight_rows[:, None] * INTER + k[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for offset in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
            rows = _load(hidden_block, offset, k, INTER, BLOCK_K)
            weight = _load(weight_block, offset, k, INTER, BLOCK_K)
            total = tl.dot(rows, weight.T, total, input_precision="ieee")
        result = total.to(out.dtype.element_ty)
        tl.store(out + places[:, None] * D + cols[None, :], result, mask=is_row[:, None] & (cols < D)[None, :])
