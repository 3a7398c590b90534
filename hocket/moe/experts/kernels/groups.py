"""A Triton kernel that lists the rows of experts which have so many places each and fill the first ones. Knows nothing
of what is computed there.

Shapes: E local experts, P places listed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_groups(
    counts,
    row_of_place,
    expert_of_tile,
    rows_of_tile,
    num_tiles,
    num_places,
    of_expert,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_TILED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts int32 [E]: of the of_expert rows that each expert has room for, the first ones are there. Each expert's
    rows in tiles of their own: row_of_place int32 [num_places], through all experts, -1 where a place has none.

    IS_TILED: writes the table of tiles as well, see `place_slots`.
    """
    bins = tl.arange(0, BINS)
    rows = tl.load(counts + bins, mask=bins < NUM_EXPERTS, other=0)
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    ends = tl.cumsum(tiles, 0)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = place // TILE_ROWS
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)  # BINS past the last one, which has no rows
    is_its = bins[None, :] == expert[:, None]
    start = tl.sum(tl.where(is_its, (ends - tiles)[None, :], 0), 1)
    count = tl.sum(tl.where(is_its, rows[None, :], 0), 1)
    index = place - start * TILE_ROWS
    is_place = place < num_places
    tl.store(row_of_place + place, tl.where(index < count, expert * of_expert + index, -1), mask=is_place)
    if IS_TILED:
        is_first = is_place & (place % TILE_ROWS == 0)
        tl.store(expert_of_tile + tile, tl.where(expert < NUM_EXPERTS, expert, -1), mask=is_first)
        tl.store(rows_of_tile + tile, tl.maximum(tl.minimum(count - index, TILE_ROWS), 0), mask=is_first)
        if tl.program_id(0) == 0:
            tl.store(num_tiles, tl.sum(tiles, 0))
