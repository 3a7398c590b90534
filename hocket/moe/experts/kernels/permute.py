"""Triton kernels that give each (row, slot) pair a place beside the other pairs of its expert, and move rows there and
back. Know nothing of what is computed in between.

Shapes: N rows, K top-k, S = N · K slots, E local experts, D columns, P places (rows of the buffer sorted by expert).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_slots(
    ids,
    local_id_of,
    counts,
    ids_stride,
    ids_step,
    num_slots,
    TOP_K: tl.constexpr,
    NUM_IDS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ids int [N, K] → counts int32 [blocks of BLOCK slots, BINS]: slots of each expert in each block; BINS ≥ E.

    NUM_IDS: how many experts all ranks have, with local_id_of int64 [NUM_IDS + 1]; 0 where ids are local.
    """
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    expert = _experts_of(ids, local_id_of, slots, ids_stride, ids_step, num_slots, TOP_K, NUM_IDS, NUM_EXPERTS)
    tl.store(counts + block * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS, mask=expert >= 0))


@triton.jit
def _experts_of(
    ids,
    local_id_of,
    slots,
    ids_stride,
    ids_step,
    num_slots,
    TOP_K: tl.constexpr,
    NUM_IDS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """int32: the local experts of slots, -1 where there is none."""
    is_slot = slots < num_slots
    expert = tl.load(
        ids + (slots // TOP_K).to(tl.int64) * ids_stride + slots % TOP_K * ids_step, mask=is_slot, other=-1
    )
    if NUM_IDS > 0:
        is_known = (expert >= 0) & (expert < NUM_IDS)
        expert = tl.load(local_id_of + expert, mask=is_known, other=-1)
    return tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, -1).to(tl.int32)


@triton.jit
def place_slots(
    ids,
    local_id_of,
    counts,
    place_of_slot,
    slot_of_place,
    expert_of_tile,
    rows_of_tile,
    num_tiles,
    rows_of_expert,
    ids_stride,
    ids_step,
    num_slots,
    max_tiles,
    num_blocks,
    TOP_K: tl.constexpr,
    NUM_IDS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXPERT_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Places of all slots, expert by expert and in the order of the slots, from what `count_slots` counted.

    EXPERT_ROWS > 0: expert e's places begin at e · EXPERT_ROWS. 0: each expert begins at a multiple of TILE_ROWS, as
    soon as there is one. Then the table of tiles is written: the expert (-1 past the last tile; ENTRIES times each),
    the number of rows, how many tiles there are; and slot_of_place int32 [P], only for places that are taken.

    Always writes place_of_slot int32 [S] (-1: of no local expert) and rows_of_expert int32 [E].
    """
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for first in range(0, num_blocks, CHUNK):
        blocks = first + tl.arange(0, CHUNK)
        found = tl.load(counts + blocks[:, None] * BINS + bins[None, :], mask=blocks[:, None] < num_blocks, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(blocks[:, None] < tl.program_id(0), found, 0), 0)
    _place(
        ids,
        local_id_of,
        before,
        total,
        place_of_slot,
        slot_of_place,
        expert_of_tile,
        rows_of_tile,
        num_tiles,
        rows_of_expert,
        ids_stride,
        ids_step,
        num_slots,
        max_tiles,
        TOP_K,
        NUM_IDS,
        NUM_EXPERTS,
        TILE_ROWS,
        EXPERT_ROWS,
        ENTRIES,
        TILES,
        BINS,
        BLOCK,
    )


@triton.jit
def place_few_slots(
    ids,
    local_id_of,
    place_of_slot,
    slot_of_place,
    expert_of_tile,
    rows_of_tile,
    num_tiles,
    rows_of_expert,
    ids_stride,
    ids_step,
    num_slots,
    max_tiles,
    TOP_K: tl.constexpr,
    NUM_IDS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXPERT_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """What `count_slots` and `place_slots` do, in one launch: every program counts all slots itself, at most SLOTS."""
    slots = tl.arange(0, SLOTS)
    expert = _experts_of(ids, local_id_of, slots, ids_stride, ids_step, num_slots, TOP_K, NUM_IDS, NUM_EXPERTS)
    # Each expert has a bin for the slots before this program's block and one for the others.
    is_late = (slots >= tl.program_id(0) * BLOCK).to(tl.int32)
    found = tl.histogram(expert * 2 + is_late, 2 * BINS, mask=expert >= 0)
    before, late = tl.split(tl.reshape(found, [BINS, 2]))
    total = before + late
    _place(
        ids,
        local_id_of,
        before,
        total,
        place_of_slot,
        slot_of_place,
        expert_of_tile,
        rows_of_tile,
        num_tiles,
        rows_of_expert,
        ids_stride,
        ids_step,
        num_slots,
        max_tiles,
        TOP_K,
        NUM_IDS,
        NUM_EXPERTS,
        TILE_ROWS,
        EXPERT_ROWS,
        ENTRIES,
        TILES,
        BINS,
        BLOCK,
    )


@triton.jit
def _place(
    ids,
    local_id_of,
    before,
    total,
    place_of_slot,
    slot_of_place,
    expert_of_tile,
    rows_of_tile,
    num_tiles,
    rows_of_expert,
    ids_stride,
    ids_step,
    num_slots,
    max_tiles,
    TOP_K: tl.constexpr,
    NUM_IDS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXPERT_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The part of `place_slots` that one program has, a block of slots and TILES tiles, from the experts' slots before
    that block and in total, both int32 [BINS]."""
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if block == 0:
        tl.store(rows_of_expert + bins, total, mask=bins < NUM_EXPERTS)
    if EXPERT_ROWS > 0:
        begin = bins * EXPERT_ROWS
    else:
        tiles = (total + TILE_ROWS - 1) // TILE_ROWS
        end = tl.cumsum(tiles, 0)
        begin = (end - tiles) * TILE_ROWS
        tile = block * TILES + tl.arange(0, TILES)
        # The tile's expert: so many end before it. Its rows: what its expert has left where the tile begins.
        expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_tile = tile < tl.sum(tiles, 0)
        known = tl.where(is_tile, expert, 0)
        rows = tl.gather(total + begin, known, 0) - tile * TILE_ROWS
        if ENTRIES == 0:
            if block == 0:
                tl.store(expert_of_tile + bins, begin + total, mask=bins < NUM_EXPERTS)
        else:
            entries = tile[:, None] * ENTRIES + tl.arange(0, ENTRIES)[None, :]
            expert = tl.where(is_tile, expert, -1)[:, None] + tl.zeros([1, ENTRIES], tl.int32)
            tl.store(expert_of_tile + entries, expert, mask=tile[:, None] < max_tiles)
        tl.store(rows_of_tile + tile, tl.minimum(rows, TILE_ROWS), mask=is_tile)
        if block == 0:
            tl.store(num_tiles, tl.sum(tiles, 0))
    slots = block * BLOCK + tl.arange(0, BLOCK)
    mine = _experts_of(ids, local_id_of, slots, ids_stride, ids_step, num_slots, TOP_K, NUM_IDS, NUM_EXPERTS)
    is_earlier = tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None]
    rank = tl.sum(((mine[:, None] == mine[None, :]) & is_earlier).to(tl.int32), 1)
    place = tl.gather(begin + before, tl.where(mine >= 0, mine, 0), 0) + rank
    tl.store(place_of_slot + slots, tl.where(mine >= 0, place, -1), mask=slots < num_slots)
    if EXPERT_ROWS == 0:
        tl.store(slot_of_place + place, slots, mask=mine >= 0)


@triton.jit
def scatter_rows(
    x, out, place_of_slot, x_stride, TOP_K: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    """x [N, D], rows x_stride apart, a multiple of ALIGN → out [P, D]: each row, read once, at its slots' places."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + tl.multiple_of(row.to(tl.int64) * x_stride, ALIGN) + cols, mask=cols < D)
    for slot in tl.static_range(TOP_K):
        place = tl.load(place_of_slot + row * TOP_K + slot).to(tl.int64)
        tl.store(out + place * D + cols, values, mask=(place >= 0) & (cols < D))


@triton.jit
def silu_and_mul_rows(gate_up, out, place_of_slot, INTER: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up [P, 2 I] → out [P, I], silu(gate) · up in fp32, at the places that are taken."""
    place = tl.load(place_of_slot + tl.program_id(0)).to(tl.int64)
    if place >= 0:
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_col = cols < INTER
        gate = tl.load(gate_up + place * 2 * INTER + cols, mask=is_col, other=0.0).to(tl.float32)
        up = tl.load(gate_up + place * 2 * INTER + INTER + cols, mask=is_col, other=0.0).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + place * INTER + cols, result.to(out.dtype.element_ty), mask=is_col)


@triton.jit
def gather_sum(
    rows,
    place_of_slot,
    weights,
    out,
    weights_row_stride,
    weights_slot_stride,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rows [P, D], weights fp32 [N, K] → out [N, D]: each row's slots, weighted, added in fp32 in their order."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        place = tl.load(place_of_slot + row * TOP_K + slot).to(tl.int64)
        is_taken = place >= 0
        weight = tl.load(weights + row.to(tl.int64) * weights_row_stride + slot * weights_slot_stride)
        values = tl.load(rows + place * D + cols, mask=is_taken & (cols < D), other=0.0).to(tl.float32)
        total += tl.where(is_taken, weight * values, 0.0)
    tl.store(out + row.to(tl.int64) * D + cols, total.to(out.dtype.element_ty), mask=cols < D)
