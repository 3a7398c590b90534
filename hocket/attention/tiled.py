"""Attention whose result for a row depends on that row's request and position alone, to the last bit.

A request's positions are cut into tiles of 16, whatever of them a step computes. A row is always attended in its own
place of its own tile, over the positions up to the tile's end, so the same shapes meet for it as a decode, in a prefill
and in any part of one. Latent attention always runs absorbed (`mla.py` says what that is), for the same reason.

Legend: T rows, H query heads, G key/value heads, C head width, B tiles, S context length, L latent width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.attention.backend import AttentionBackend
from hocket.attention.base import AttentionMetadata
from hocket.attention.mla import absorbed
from hocket.attention.plan import MAX_GATHERED_BYTES, Plan, context_slots, writes
from hocket.attention.sdpa import gather_rows
from hocket.cache.storage import write_kv, write_latent
from hocket.host import sent
from hocket.layers.kernels import TiledKernels
from hocket.trace import spans
from hocket.trace.spans import Stage

TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one tile: `count` rows from `row` on, at `place` and after it in the tile."""

    request: int
    row: int
    place: int
    count: int


@dataclass(frozen=True, kw_only=True)
class TileGroup:
    """Tiles that end at the same position, of any requests, attended in one call.

    rows: int64 [N] into [T, …]; places: int64 [N], where they stand in [B · TILE_ROWS, …]. slots: int64 [B · S].
    mask: [TILE_ROWS, S], 0 or −inf.
    """

    num_tiles: int
    rows: Tensor
    places: Tensor
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True, kw_only=True)
class TiledPlan(Plan):
    """One step's (or ubatch's) tiles."""

    groups: tuple[TileGroup, ...]


class TiledAttention(AttentionBackend[TiledPlan]):
    """PyTorch's scaled_dot_product_attention, one task per tile and head: what shares the call changes no task."""

    name = "tiled"

    def __init__(self) -> None:
        self._kernels = TiledKernels()

    def plan(
        self, meta: AttentionMetadata, num_rows: int, block_size: int, dtype: torch.dtype, slot_bytes: int
    ) -> TiledPlan:
        write_rows, write_slots = writes(meta, num_rows)
        groups = []
        for tile, parts in sorted(_parts(meta).items()):
            most = max(1, MAX_GATHERED_BYTES // (slot_bytes * (tile + 1) * TILE_ROWS))
            for first in range(0, len(parts), most):
                groups.append(_group(meta, tile, parts[first : first + most], block_size, dtype))
        return TiledPlan(num_rows=num_rows, write_rows=write_rows, write_slots=write_slots, groups=tuple(groups))

    def grouped_query(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: TiledPlan, scale: float
    ) -> Tensor:
        spans.begin(Stage.ATTENTION)
        if plan.write_slots is not None:
            write_kv(cache, plan.written(key), plan.written(value), plan.write_slots)
        keys, values = cache.flatten(1, 2).flatten(2).unbind(0)
        return _attend(query, keys, values, cache.shape[3], plan, scale).flatten(1)

    def latent(
        self,
        query: Tensor,
        latent: Tensor,
        kv_b: Tensor,
        cache: Tensor,
        plan: TiledPlan,
        scale: float,
        is_stored: bool = False,
    ) -> Tensor:
        assert not is_stored
        spans.begin(Stage.ATTENTION)
        if plan.write_slots is not None:
            write_latent(cache, plan.written(latent), plan.write_slots)
        latent_width = kv_b.shape[2]
        plain = query.shape[2] - (cache.shape[2] - latent_width)
        into, out_of = absorbed(kv_b, plain)
        q = torch.cat((self._kernels.per_head(query[..., :plain], into), query[..., plain:]), dim=-1)
        flat = cache.flatten(0, 1)
        # Values are the latents. The rotated part rides along and is dropped: equal widths take the fused kernel.
        out = _attend(q, flat, flat, 1, plan, scale)[..., :latent_width]
        return self._kernels.per_head(out, out_of).flatten(1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, num_kv_heads: int, plan: TiledPlan, scale: float) -> Tensor:
    """query [T, H, C] against rows of keys and values [slots, G · C]: [T, H, C]."""
    num_heads, width = query.shape[1:]
    out = torch.zeros_like(query)
    for group in plan.groups:
        tiles = query.new_zeros(group.num_tiles * TILE_ROWS, num_heads, width)
        tiles[group.places] = query[group.rows]
        contexts = (group.num_tiles, -1, num_kv_heads, width)
        k = gather_rows(keys, group.slots).view(contexts).transpose(1, 2)
        v = k if values is keys else gather_rows(values, group.slots).view(contexts).transpose(1, 2)
        q = tiles.view(group.num_tiles, TILE_ROWS, num_heads, width).transpose(1, 2)
        done = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
        out[group.rows] = done.transpose(1, 2).reshape(tiles.shape)[group.places]
    return out


def _parts(meta: AttentionMetadata) -> dict[int, list[Part]]:
    """What the step computes of each tile, by the tile's number in its request."""
    parts: dict[int, list[Part]] = {}
    for request, (row, stop) in enumerate(pairwise(meta.query_start_loc_cpu)):
        position = meta.seq_lens_cpu[request] - (stop - row)
        while row < stop:
            tile, place = divmod(position, TILE_ROWS)
            count = min(stop - row, TILE_ROWS - place)
            parts.setdefault(tile, []).append(Part(request, row, place, count))
            row += count
            position += count
    return parts


def _group(meta: AttentionMetadata, tile: int, parts: Sequence[Part], block_size: int, dtype: torch.dtype) -> TileGroup:
    device = meta.block_table.device
    end = (tile + 1) * TILE_ROWS
    slots, _ = context_slots(meta, [part.request for part in parts], end, block_size)
    hidden = torch.ones(TILE_ROWS, end, dtype=torch.bool, device=device).triu_(end - TILE_ROWS + 1)
    places_of = (i * TILE_ROWS + part.place for i, part in enumerate(parts))
    return TileGroup(
        num_tiles=len(parts),
        rows=_indices((part.row for part in parts), parts, device),
        places=_indices(places_of, parts, device),
        slots=slots.flatten(),
        mask=torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf")),
    )


def _indices(starts: Iterator[int], parts: Sequence[Part], device: torch.device) -> Tensor:
    """int64 [N]: `count` numbers from each part's start on."""
    numbers = [start + i for start, part in zip(starts, parts, strict=True) for i in range(part.count)]
    return sent(numbers, torch.int64, device)
