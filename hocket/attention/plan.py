"""Turns a step's metadata into row ranges, slot indices and masks, once for all layers. Knows no head shapes.

A request with one new token is a decode row: all of them are attended together, padded to the longest context, unless
that would gather too many bytes at once; then those of similar length are.
Every other request is cut into prefill tiles. A masked position points at the request's own first slot, which has
always been written, so no tensor that reaches attention ever holds an unwritten or foreign row.

Legend: T rows, R decode rows, S context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.host import sent

MAX_TILE_ROWS = 1024
MAX_GATHERED_BYTES = 256 << 20
"""Most bytes of a layer's cache that decodes gather at once (one context alone may have more)."""
Rows = slice | Tensor


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Requests with one new token. rows: into [T, …]. slots: int64 [R · S]. mask: [R, 1, 1, S], 0 or −inf."""

    rows: Rows
    num_rows: int
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillTile:
    """Consecutive rows [start, stop) of one request, of which the first has `num_past` tokens before it.

    slots: int64 [num_past + stop − start] of the whole context up to the last row, None if there is no past: then the
    keys and values are the step's own rows. Row i sees the first num_past + i + 1 of them.
    """

    start: int
    stop: int
    num_past: int
    slots: Tensor | None

    def mask(self, device: torch.device) -> Tensor | None:
        """bool [rows, S], True where visible; None: plain causal, nothing is past."""
        if self.slots is None:
            return None
        rows = self.stop - self.start
        return torch.ones(rows, self.num_past + rows, dtype=torch.bool, device=device).tril_(self.num_past)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all plans say of one step (or ubatch). write_rows None: every row is written, at `write_slots` (None: none
    is)."""

    num_rows: int
    write_rows: Rows | None
    write_slots: Tensor | None

    def written(self, x: Tensor) -> Tensor:
        """Those rows of x [T, …] that go to the cache."""
        return x if self.write_rows is None else x[self.write_rows]


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(Plan):
    """Decodes gathered and padded, prefills request by request."""

    decodes: tuple[DecodePlan, ...]
    prefills: tuple[PrefillTile, ...]


def plan_attention(
    meta: AttentionMetadata, num_rows: int, block_size: int, dtype: torch.dtype, slot_bytes: int = 1
) -> AttentionPlan:
    """The plan for `num_rows` rows (padding included) over a cache of `block_size` tokens a block.

    dtype: of the queries; the decode mask is made in it. slot_bytes: what a layer's cache holds of one token.
    """
    decodes: list[int] = []
    prefills: list[PrefillTile] = []
    starts = meta.query_start_loc_cpu
    for request, (start, stop) in enumerate(pairwise(starts)):
        if stop - start == 1:
            decodes.append(request)
        elif stop > start:
            prefills += _tiles(meta, request, start, stop, block_size)
    write_rows, write_slots = writes(meta, num_rows)
    return AttentionPlan(
        num_rows=num_rows,
        write_rows=write_rows,
        write_slots=write_slots,
        decodes=tuple(
            _decodes(meta, group, block_size, dtype)
            for group in _groups(meta.seq_lens_cpu, decodes, MAX_GATHERED_BYTES // slot_bytes)
        ),
        prefills=tuple(prefills),
    )


def writes(meta: AttentionMetadata, num_rows: int) -> tuple[Rows | None, Tensor | None]:
    """`write_rows` and `write_slots` of a plan."""
    if meta.num_tokens == 0:
        return None, None
    slots = meta.slot_mapping[: meta.num_tokens]
    kept = slots >= 0
    if bool(kept.all()):
        return (None if meta.num_tokens == num_rows else slice(0, meta.num_tokens)), slots
    rows = kept.nonzero().flatten()
    return (rows, slots[rows]) if len(rows) else (None, None)


def _tiles(meta: AttentionMetadata, request: int, start: int, stop: int, block_size: int) -> list[PrefillTile]:
    length = meta.seq_lens_cpu[request]
    past = length - (stop - start)
    if past == 0:
        return [PrefillTile(start=start, stop=stop, num_past=0, slots=None)]
    blocks = meta.block_table[request, : -(-length // block_size)].to(torch.int64)
    offsets = torch.arange(block_size, dtype=torch.int64, device=blocks.device)
    slots = (blocks[:, None] * block_size + offsets).flatten()
    return [
        PrefillTile(
            start=first,
            stop=min(first + MAX_TILE_ROWS, stop),
            num_past=past + first - start,
            slots=slots[: past + min(first + MAX_TILE_ROWS, stop) - start],
        )
        for first in range(start, stop, MAX_TILE_ROWS)
    ]


def _groups(seq_lens: Sequence[int], requests: list[int], max_slots: int) -> list[list[int]]:
    """`requests` as few groups of similar length, rows × longest of each at most `max_slots`; one if that is enough."""
    if not requests:
        return []
    if len(requests) * max(seq_lens[request] for request in requests) <= max_slots:
        return [requests]
    ordered = sorted(requests, key=lambda request: seq_lens[request], reverse=True)
    groups: list[list[int]] = []
    start = 0
    while start < len(ordered):
        stop = start + max(1, max_slots // seq_lens[ordered[start]])
        groups.append(sorted(ordered[start:stop]))
        start = stop
    return groups


def _decodes(meta: AttentionMetadata, requests: list[int], block_size: int, dtype: torch.dtype) -> DecodePlan:
    longest = max(meta.seq_lens_cpu[request] for request in requests)
    slots, hidden = context_slots(meta, requests, longest, block_size)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return DecodePlan(
        rows=_as_rows([meta.query_start_loc_cpu[request] for request in requests], hidden.device),
        num_rows=len(requests),
        slots=slots.flatten(),
        mask=mask[:, None, None, :],
    )


def context_slots(meta: AttentionMetadata, requests: list[int], length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Slots int64 [R, length] of the first `length` positions of each of `requests`, and which lie past its end:
    bool [R, length]; those point at its first slot."""
    device = meta.block_table.device
    table, seq_lens = meta.block_table, meta.seq_lens
    if requests != list(range(len(meta.seq_lens_cpu))):
        picked = sent(requests, torch.int64, device)
        table, seq_lens = table.index_select(0, picked), seq_lens.index_select(0, picked)
    positions = torch.arange(length, dtype=torch.int64, device=device)
    hidden = positions >= seq_lens[:, None]
    positions = positions.expand(len(requests), -1).masked_fill(hidden, 0)
    blocks = table.to(torch.int64).gather(1, positions.div(block_size, rounding_mode="floor"))
    return blocks * block_size + positions.remainder(block_size), hidden


def _as_rows(rows: list[int], device: torch.device) -> Rows:
    """A slice where the rows are consecutive (no copy), else their indices."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return sent(rows, torch.int64, device)
