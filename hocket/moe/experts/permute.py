"""Where each (row, slot) pair stands when rows are sorted by expert, on a GPU and without the host knowing any count.
Knows nothing of what is computed there.

Shapes: N rows, K top-k, S = N · K slots, E local experts, D columns, P places (rows of the sorted buffer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hocket.launch import Launch, launches

BLOCK_SLOTS = 128
BLOCK_COLUMNS = 1024
FEW_SLOTS = 8192
"""Up to so many slots one launch does it, in which every program counts all of them: 32 for each of 256 threads, some
50 instructions each, which takes less than a second launch and the gap before it."""
FEW_SLOTS_BY_EXPERTS = FEW_SLOTS * 64
"""Nor more slots times local experts: counting a slot takes longer where there are many bins."""
FEW_PROGRAMS = 128
"""No more than an H100 has multiprocessors: two on one of them would count one after the other."""
FEW_TILES = 16
FEW_WARPS = 8
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
    (or [P], once per place), -1 past the last, or [E], the place behind each expert's last row; rows_of_tile int32 [T];
    num_tiles int32 [1].
    """

    slot_of_place: Tensor
    max_tiles: int
    expert_of_tile: Tensor
    rows_of_tile: Tensor
    num_tiles: Tensor


def tiles_of(
    ids: Tensor,
    num_experts: int,
    tile_rows: int,
    local_id_of: Tensor | None = None,
    *,
    told: Literal["tiles", "places", "ends"] = "tiles",
) -> Tiles:
    """Tiles of tile_rows for ids int [N, K] (rows may be strided): indices of local experts where local_id_of is None,
    else ids of all experts, whose indices local_id_of int64 [all + 1] has, or -1. Any other id counts as -1. told: what
    expert_of_tile is of."""
    num_slots = ids.numel()
    max_tiles = num_slots // tile_rows + min(num_experts, num_slots)
    num_places = max_tiles * tile_rows
    entries = {"tiles": 1, "places": tile_rows, "ends": 0}[told]
    num_told = max_tiles * entries if entries else num_experts
    sizes = num_slots, num_experts, num_places, num_told, max_tiles, 1
    place_of_slot, rows_of_expert, slot_of_place, expert_of_tile, rows_of_tile, num_tiles = int32_parts(ids, *sizes)
    tiles = Tiles(
        num_places=num_places,
        place_of_slot=place_of_slot,
        rows_of_expert=rows_of_expert,
        slot_of_place=slot_of_place,
        max_tiles=max_tiles,
        expert_of_tile=expert_of_tile,
        rows_of_tile=rows_of_tile,
        num_tiles=num_tiles,
    )
    _place(ids, local_id_of, tiles, tile_rows=tile_rows, entries=entries)
    return tiles


def masked_places_of(ids: Tensor, num_experts: int, expert_rows: int, local_id_of: Tensor | None = None) -> Places:
    """expert_rows places for each expert, of which the first rows_of_expert are taken; ids as in `tiles_of`.

    The caller knows that no expert has more than expert_rows slots.
    """
    places = Places(num_experts * expert_rows, *int32_parts(ids, ids.numel(), num_experts))
    _place(ids, local_id_of, places, expert_rows=expert_rows)
    return places


def int32_parts(like: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """int32 tensors of these sizes, not set, in one piece of memory: each begins at a multiple of 16 bytes."""
    steps = [step for size in sizes for step in (size, -size % 4)]
    return torch.empty(sum(steps), device=like.device, dtype=torch.int32).split_with_sizes(steps)[::2]


def _place(
    ids: Tensor,
    local_id_of: Tensor | None,
    places: Places,
    *,
    tile_rows: int = 1,
    expert_rows: int = 0,
    entries: int = 1,
) -> None:
    """Give every slot its place, in one launch where slots are few, else in two."""
    num_slots, num_experts = ids.numel(), len(places.rows_of_expert)
    ids = ids.view(-1, 1) if ids.is_contiguous() else ids
    tiles = places if isinstance(places, Tiles) else None
    unused = places.place_of_slot
    results = (
        places.place_of_slot,
        tiles.slot_of_place if tiles else unused,
        tiles.expert_of_tile if tiles else unused,
        tiles.rows_of_tile if tiles else unused,
        tiles.num_tiles if tiles else unused,
        places.rows_of_expert,
    )
    num_ids = 0 if local_id_of is None else len(local_id_of) - 1
    of_ids = num_slots, num_experts, num_ids, ids.shape[1], ids.stride()
    sizes = *of_ids, tiles.max_tiles if tiles else 0, tile_rows, expert_rows, entries
    if num_slots <= FEW_SLOTS and num_slots * num_experts <= FEW_SLOTS_BY_EXPERTS:
        _few_launch(*sizes)(ids, local_id_of, *results)
        return
    shape, count, place = _launches(*sizes)
    counts = ids.new_empty(shape, dtype=torch.int32)
    count(ids, local_id_of, counts)
    place(ids, local_id_of, counts, *results)


@launches
def _few_launch(
    num_slots: int,
    num_experts: int,
    num_ids: int,
    top_k: int,
    strides: tuple[int, ...],
    max_tiles: int,
    tile_rows: int,
    expert_rows: int,
    entries: int,
) -> Launch:
    from hocket.moe.experts.kernels import permute as kernels

    counted = max(32 * FEW_WARPS, 1 << (num_slots - 1).bit_length())
    block = max(32, counted // FEW_PROGRAMS)
    return Launch(
        kernels.place_few_slots,
        (max(-(-num_slots // block), -(-max_tiles // FEW_TILES)),),
        *strides,
        num_slots,
        max_tiles,
        TOP_K=top_k,
        NUM_IDS=num_ids,
        NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows,
        EXPERT_ROWS=expert_rows,
        ENTRIES=entries,
        TILES=FEW_TILES,
        BINS=bins_of(num_experts, 16),
        BLOCK=block,
        SLOTS=counted,
        num_warps=FEW_WARPS,
    )


@launches
def _launches(
    num_slots: int,
    num_experts: int,
    num_ids: int,
    top_k: int,
    strides: tuple[int, ...],
    max_tiles: int,
    tile_rows: int,
    expert_rows: int,
    entries: int,
) -> tuple[tuple[int, int], Launch, Launch]:
    """Shape of the counts, and the two launches."""
    from hocket.moe.experts.kernels import permute as kernels

    num_blocks, bins = -(-num_slots // BLOCK_SLOTS), bins_of(num_experts, 32)
    constants = {
        "TOP_K": top_k,
        "NUM_IDS": num_ids,
        "NUM_EXPERTS": num_experts,
        "BINS": bins,
        "BLOCK": BLOCK_SLOTS,
    }
    count = Launch(kernels.count_slots, (num_blocks,), *strides, num_slots, **constants)
    tiles_at_once = 64 if entries <= 1 else 16
    place = Launch(
        kernels.place_slots,
        (max(num_blocks, -(-max_tiles // tiles_at_once)),),
        *strides,
        num_slots,
        max_tiles,
        num_blocks,
        TILE_ROWS=tile_rows,
        EXPERT_ROWS=expert_rows,
        ENTRIES=entries,
        TILES=tiles_at_once,
        CHUNK=max(1, _COUNTS_AT_ONCE // bins),
        **constants,
    )
    return (num_blocks, bins), count, place


def bins_of(num_experts: int, least: int) -> int:
    """A power of two; a warp counts into at least 32, here into `least` or into twice as many."""
    return max(least, 1 << (num_experts - 1).bit_length())


def row_alignment(stride: int) -> int:
    """The largest power of two up to 16 that divides the distance of rows, in elements."""
    return math.gcd(stride, 16)


def scatter_rows(x: Tensor, places: Places, top_k: int) -> Tensor:
    """x [N, D] (rows may be strided) → [P, D]: each slot's row at its place; what else is there is undefined."""
    width = x.shape[1]
    out = x.new_empty(places.num_places, width)
    _scatter_launch(len(x), width, x.stride(0), top_k)(x, out, places.place_of_slot)
    return out


@launches
def _scatter_launch(num_rows: int, width: int, stride: int, top_k: int) -> Launch:
    from hocket.moe.experts.kernels import permute as kernels

    grid = num_rows, -(-width // BLOCK_COLUMNS)
    constants = {"TOP_K": top_k, "D": width, "ALIGN": row_alignment(stride), "BLOCK": BLOCK_COLUMNS}
    return Launch(kernels.scatter_rows, grid, stride, **constants)


def silu_and_mul_rows(gate_up: Tensor, places: Places) -> Tensor:
    """gate_up [P, 2 I] → [P, I] at the places that are taken; what else is there is undefined."""
    inter = gate_up.shape[1] // 2
    out = gate_up.new_empty(places.num_places, inter)
    _silu_launch(len(places.place_of_slot), inter)(gate_up, out, places.place_of_slot)
    return out


@launches
def _silu_launch(num_slots: int, inter: int) -> Launch:
    from hocket.moe.experts.kernels import permute as kernels

    grid = num_slots, -(-inter // BLOCK_COLUMNS)
    return Launch(kernels.silu_and_mul_rows, grid, INTER=inter, BLOCK=BLOCK_COLUMNS)


def gather_sum(rows: Tensor, places: Places, weights: Tensor) -> Tensor:
    """rows [P, D], weights fp32 [N, K] → [N, D]: weighted sum of each row's slots, in fp32 and in their order.

    A row without a slot anywhere is zero.
    """
    num_rows, top_k = weights.shape
    width = rows.shape[1]
    out = rows.new_empty(num_rows, width)
    _gather_launch(num_rows, width, top_k, weights.stride())(rows, places.place_of_slot, weights, out)
    return out


@launches
def _gather_launch(num_rows: int, width: int, top_k: int, strides: tuple[int, ...]) -> Launch:
    """strides: of the weights."""
    from hocket.moe.experts.kernels import permute as kernels

    grid = num_rows, -(-width // BLOCK_COLUMNS)
    return Launch(kernels.gather_sum, grid, *strides, TOP_K=top_k, D=width, BLOCK=BLOCK_COLUMNS)
