"""Triton kernels of two grouped GEMMs over tiles of rows, each tile of one expert. Know nothing of routing.

Both are persistent: program p of n computes blocks p, p + n, … of the output. Rows of a tile past
its number are computed from whatever is there and not stored, as are columns past an expert's weights. Weights come as
pointers or, with USE_TMA, as descriptors of all experts' rows with blocks of [BLOCK_N, BLOCK_K].

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
def _weight_block(
    weights, first, row, k, ROWS: tl.constexpr, K_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr
):
    """What `_weight` reads from: BLOCK_N rows from `row` on of the ROWS that begin at row `first` of weights; past the
    last one it stands in."""
    if USE_TMA:
        return weights
    else:
        rows = tl.minimum(row + tl.arange(0, BLOCK_N), ROWS - 1)
        return weights + first.to(tl.int64) * K_SIZE + rows[:, None] * K_SIZE + k[None, :]


@triton.jit
def _weight(block, row, offset, k, K_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr):
    """A block [BLOCK_N, BLOCK_K] of weights; zeros past K_SIZE."""
    if USE_TMA:
        return block.load([row, offset])
    else:
        return _load(block, offset, k, K_SIZE, BLOCK_K)


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
    USE_TMA: tl.constexpr,
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
        expert = tl.load(expert_of_tile + tile)
        is_row = lanes < tl.load(rows_of_tile + tile)
        places = tile * BLOCK_M + lanes
        slots = tl.load(slot_of_place + places, mask=is_row, other=0)
        starts = tl.multiple_of((slots // TOP_K).to(tl.int64) * x_stride, [ALIGN])
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        x_block = x + starts[:, None] + k[None, :]
        first = expert * (2 * INTER)
        gate_row = first + column * BLOCK_N
        gate_block = _weight_block(w13, first, column * BLOCK_N, k, INTER, D, BLOCK_N, USE_TMA)
        up_block = gate_block if USE_TMA else gate_block + INTER * D
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for offset in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            rows = _load(x_block, offset, k, D, BLOCK_K)
            gate_weight = _weight(gate_block, gate_row, offset, k, D, BLOCK_K, USE_TMA)
            up_weight = _weight(up_block, gate_row + INTER, offset, k, D, BLOCK_K, USE_TMA)
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
    USE_TMA: tl.constexpr,
):
    """hidden [P, I], w2 [E, D, I] → out [P, D]."""
    tiles = tl.load(num_tiles)
    columns: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    lanes = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for work in range(tl.program_id(0), tiles * columns, tl.num_programs(0)):
        tile, column = _block(work, tiles, columns, GROUP)
        expert = tl.load(expert_of_tile + tile)
        is_row = lanes < tl.load(rows_of_tile + tile)
        places = (tile * BLOCK_M + lanes).to(tl.int64)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        hidden_block = hidden + places[:, None] * INTER + k[None, :]
        weight_row = expert * D + column * BLOCK_N
        weight_block = _weight_block(w2, expert * D, column * BLOCK_N, k, D, INTER, BLOCK_N, USE_TMA)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for offset in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
            rows = _load(hidden_block, offset, k, INTER, BLOCK_K)
            weight = _weight(weight_block, weight_row, offset, k, INTER, BLOCK_K, USE_TMA)
            total = tl.dot(rows, weight.T, total, input_precision="ieee")
        result = total.to(out.dtype.element_ty)
        tl.store(out + places[:, None] * D + cols[None, :], result, mask=is_row[:, None] & (cols < D)[None, :])
