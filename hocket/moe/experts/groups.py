"""Places of rows that stand expert by expert already, on a GPU and without the host knowing any count. Knows nothing of
what is computed there.

Shapes: E local experts, R places of one expert, N most rows of all, P places of tiles.
"""

from __future__ import annotations

from hocket.launch import Launch, launches
from hocket.moe.experts.permute import BLOCK_SLOTS, Places, Tiles, bins_of, int32_parts
from hocket.moe.grouped import GroupedRows

COMPARED_AT_ONCE = 4096
"""Places times experts: each place looks for its own among all."""


def tiles_of_groups(rows: GroupedRows, tile_rows: int) -> Tiles:
    """Tiles of rows that stand expert by expert already. A slot is then a place of those: slot_of_place has where each
    row stands, through all experts, and -1 where there is none; place_of_slot is not set."""
    num_experts, max_rows = len(rows.counts), rows.max_rows
    max_tiles = max_rows // tile_rows + min(num_experts, max_rows)
    num_places = max_tiles * tile_rows
    slot_of_place, expert_of_tile, rows_of_tile, num_tiles = int32_parts(
        rows.counts, num_places, max_tiles, max_tiles, 1
    )
    launch = _groups_launch(num_places, rows.x.shape[1], num_experts, tile_rows, is_tiled=True)
    launch(rows.counts, slot_of_place, expert_of_tile, rows_of_tile, num_tiles)
    return Tiles(
        num_places=num_places,
        place_of_slot=slot_of_place,
        rows_of_expert=rows.counts,
        slot_of_place=slot_of_place,
        max_tiles=max_tiles,
        expert_of_tile=expert_of_tile,
        rows_of_tile=rows_of_tile,
        num_tiles=num_tiles,
    )


def places_of_groups(rows: GroupedRows) -> Places:
    """The places where the rows stand: those of experts one behind the other."""
    num_experts, of_expert, _ = rows.x.shape
    (place_of_slot,) = int32_parts(rows.counts, rows.max_rows)
    launch = _groups_launch(rows.max_rows, of_expert, num_experts, 1, is_tiled=False)
    launch(rows.counts, place_of_slot, place_of_slot, place_of_slot, place_of_slot)
    return Places(num_experts * of_expert, place_of_slot, rows.counts)


@launches
def _groups_launch(num_places: int, of_expert: int, num_experts: int, tile_rows: int, is_tiled: bool) -> Launch:
    from hocket.moe.experts.kernels import groups as kernels

    bins = bins_of(num_experts, 16)
    block = max(32, min(BLOCK_SLOTS, COMPARED_AT_ONCE // bins))
    return Launch(
        kernels.list_groups,
        (-(-num_places // block),),
        num_places,
        of_expert,
        NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows,
        IS_TILED=is_tiled,
        BINS=bins,
        BLOCK=block,
    )
