"""Where each (row, slot) pair stands when rows are sorted by expert, on a GPU and without the host knowing any count.
Knows nothing of what is computed there.

Shapes: N rows, K top-k, S = N · K slots, E local experts, D columns, P places (rows of the sorted buffer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SLOTS = 128
BLOCK_COLUMNS = 1024
_COUNTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Places:
    """place_of_slot int32 [S], -1 where no local expert computes the slot; rows_of_expert int32 [E]."""

    num_places: int
    place_of_slot: Tensor
    rows_of_expert: Tensor


@dataclass(frozen=True, slots=True)
class Tiles(Places):
    """Places of an expert begin at a multiple of the tile's rows, directly behind the last tile of the one before.

    slot_of_place int32 [P] (undefined where nothing stands); max_tiles T, from shapes alone; expert_of_tile int32 [T]
    (or [P], once per place), -1 past the last; rows_of_tile int32 [T]; num_tiles int32 [1].
    """

    slot_of_place: Tensor
    max_tiles: int
    expert_of_tile: Tensor
    rows_of_tile: Tensor
    num_tiles: Tensor


def tiles_of(local_ids: Tensor, num_experts: int, tile_rows: int, *, expert_per_place: bool = False) -> Tiles:
    """Tiles of tile_rows for local_ids int64 [N, K] in [-1, E); any other id counts as -1."""
    num_slots = local_ids.numel()
    max_tiles = num_slots // tile_rows + min(num_experts, num_slots)
    num_places = max_tiles * tile_rows
    entries = tile_rows if expert_per_place else 1
    empty = _int32_on(local_ids)
    tiles = Tiles(
        num_places=num_places,
        place_of_slot=empty(num_slots),
        rows_of_expert=empty(num_experts),
        slot_of_place=empty(num_places),
        max_tiles=max_tiles,
        expert_of_tile=empty(max_tiles * entries),
        rows_of_tile=empty(max_tiles),
        num_tiles=empty(1),
    )
    _place(local_ids, tiles, tile_rows=tile_rows, entries=entries)
    return tiles


def masked_places_of(local_ids: Tensor, num_experts: int, expert_rows: int) -> Places:
    """expert_rows places for each expert, of which the first rows_of_expert are taken; ids as in `tiles_of`.

    The caller knows that no expert has more than expert_rows slots.
    """
    empty = _int32_on(local_ids)
    places = Places(num_experts * expert_rows, empty(local_ids.numel()), empty(num_experts))
    _place(local_ids, places, expert_rows=expert_rows)
    return places


def _int32_on(like: Tensor) -> Callable[[int], Tensor]:
    return lambda size: torch.empty(size, device=like.device, dtype=torch.int32)


def _place(local_ids: Tensor, places: Places, *, tile_rows: int = 1, expert_rows: int = 0, entries: int = 1) -> None:
    """Two kernels: count each expert's slots in each block of slots, then give every slot its place."""
    from hocket.moe.experts.kernels import permute as kernels

    ids = local_ids.reshape(-1)
    num_slots, num_experts = len(ids), len(places.rows_of_expert)
    num_blocks = -(-num_slots // BLOCK_SLOTS)
    bins = max(32, 1 << num_experts.bit_length())
    counts = ids.new_empty(num_blocks, bins, dtype=torch.int32)
    kernels.count_slots[(num_blocks,)](ids, counts, num_slots, num_experts, bins, BLOCK_SLOTS)
    tiles = places if isinstance(places, Tiles) else None
    tiles_at_once = 64 if entries == 1 else 16
    max_tiles = tiles.max_tiles if tiles else 0
    unused = places.place_of_slot
    kernels.place_slots[(max(num_blocks, -(-max_tiles // tiles_at_once)),)](
        ids,
        counts,
        places.place_of_slot,
        tiles.slot_of_place if tiles else unused,
        tiles.expert_of_tile if tiles else unused,
        tiles.rows_of_tile if tiles else unused,
        tiles.num_tiles if tiles else unused,
        places.rows_of_expert,
        num_slots,
        num_blocks,
        max_tiles,
        NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows,
        EXPERT_ROWS=expert_rows,
        ENTRIES=entries,
        TILES=tiles_at_once,
        BINS=bins,
        BLOCK=BLOCK_SLOTS,
        CHUNK=max(1, _COUNTS_AT_ONCE // bins),
    )


def row_alignment(x: Tensor) -> int:
    """The largest power of two up to 16 that divides the distance of x's rows, in elements."""
    return math.gcd(x.stride(0), 16)


def scatter_rows(x: Tensor, places: Places, top_k: int) -> Tensor:
    """x [N, D] (rows may be strided) → [P, D]: each slot's row at its place; what else is there is undefined."""
    from hocket.moe.experts.kernels import permute as kernels

    width = x.shape[1]
    out = x.new_empty(places.num_places, width)
    grid = len(places.place_of_slot), -(-width // BLOCK_COLUMNS)
    kernels.scatter_rows[grid](x, x.stride(0), out, places.place_of_slot, top_k, width, row_alignment(x), BLOCK_COLUMNS)
    return out


def silu_and_mul_rows(gate_up: Tensor, places: Places) -> Tensor:
    """gate_up [P, 2 I] → [P, I] at the places that are taken; what else is there is undefined."""
    from hocket.moe.experts.kernels import permute as kernels

    inter = gate_up.shape[1] // 2
    out = gate_up.new_empty(places.num_places, inter)
    grid = len(places.place_of_slot), -(-inter // BLOCK_COLUMNS)
    kernels.silu_and_mul_rows[grid](gate_up, out, places.place_of_slot, inter, BLOCK_COLUMNS)
    return out


def gather_sum(rows: Tensor, places: Places, weights: Tensor) -> Tensor:
    """rows [P, D], weights fp32 [N, K] → [N, D]: weighted sum of each row's slots, in fp32 and in their order.

    A row without a slot anywhere is zero.
    """
    from hocket.moe.experts.kernels import permute as kernels

    num_rows, top_k = weights.shape
    width = rows.shape[1]
    out = rows.new_empty(num_rows, width)
    kernels.gather_sum[(num_rows, -(-width // BLOCK_COLUMNS))](
        rows, places.place_of_slot, weights, *weights.stride(), out, top_k, width, BLOCK_COLUMNS
    )
    return out
