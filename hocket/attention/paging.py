"""Index arithmetic of paged attention on the host, in numpy. Knows no kernels and nothing that lies on a GPU.

Legend: R requests, B blocks of the longest request, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hocket.attention.base import AttentionMetadata

ABSORBED_ROWS = 128
"""A chunk of at most so many rows is cheaper absorbed: expanding a latent costs 512 · 256 multiplications a head,
attending to it in 576 + 512 instead of 192 + 128 components 768 a row and head; they meet at 170 rows."""
ROWS_PER_TILE = 64
MAX_TILES = 12288
"""FlashInfer's plan of paged latents has room for 16384 pieces of work: tiles of 64 rows × heads and a few splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive rows [start, stop) of one request; the last of them sees the first `context` tokens."""

    request: int
    start: int
    stop: int
    context: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def past(self) -> int:
        return self.context - self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Blocks of R contexts one after another: int32 indptr [R + 1], indices, tokens in each last block [R]."""

    indptr: np.ndarray
    indices: np.ndarray
    last: np.ndarray


def pieces(meta: AttentionMetadata) -> list[Piece]:
    """The rows of each request that has some, in order."""
    rows = enumerate(zip(pairwise(meta.query_start_loc_cpu), meta.seq_lens_cpu, strict=True))
    return [
        Piece(request=request, start=start, stop=stop, context=context)
        for request, ((start, stop), context) in rows
        if stop > start
    ]


def pages(table: np.ndarray, lens: np.ndarray, block_size: int) -> Pages:
    """The blocks of contexts of `lens` tokens (int32 [R], none 0) by their rows of `table` (int32 [R, B])."""
    counts = -(-lens // block_size)
    width = int(counts.max(initial=0))
    return Pages(
        indptr=starts_of(counts),
        indices=table[:, :width][np.arange(width, dtype=np.int32) < counts[:, None]],
        last=lens - (counts - 1) * block_size,
    )


def slots_of(table: np.ndarray, lens: np.ndarray, block_size: int) -> np.ndarray:
    """Slots of the same contexts' tokens, one after another: int64 [sum of lens]."""
    starts = starts_of(lens)
    positions = np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], lens)
    blocks = table[np.repeat(np.arange(len(lens)), lens), positions // block_size]
    slots: np.ndarray = blocks.astype(np.int64) * block_size + positions % block_size
    return slots


def starts_of(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """int32 [R + 1]: where each of R things of so many parts starts, and the end."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def rows_of(parts: Sequence[Piece]) -> slice | np.ndarray:
    """The rows of all parts: a slice where they are consecutive, else int64 [rows]."""
    if all(a.stop == b.start for a, b in pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])


def latent_groups(
    parts: Sequence[Piece], num_heads: int, max_expanded: int
) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """How rows attend over latents: (absorbed, expanded), each in groups that one call takes.

    Expanded are fresh prompts and long chunks, in groups of at most `max_expanded` tokens of context together; a
    context longer than that is absorbed, which needs no memory for it.
    """
    absorbed: list[Piece] = []
    expanded: list[Piece] = []
    for part in parts:
        is_short = part.num_rows == 1 or (part.past > 0 and part.num_rows <= ABSORBED_ROWS)
        (absorbed if is_short or part.context > max_expanded else expanded).append(part)
    max_rows = MAX_TILES * ROWS_PER_TILE // num_heads
    cut = [short for part in absorbed for short in _cut(part, max_rows)]
    return (
        _packed(cut, lambda part: -(-part.num_rows * num_heads // ROWS_PER_TILE), MAX_TILES),
        _packed(expanded, lambda part: part.context, max_expanded),
    )


def _cut(part: Piece, max_rows: int) -> Iterator[Piece]:
    """`part` in pieces of at most `max_rows` rows."""
    for start in range(part.start, part.stop, max_rows):
        stop = min(start + max_rows, part.stop)
        yield Piece(request=part.request, start=start, stop=stop, context=part.context - (part.stop - stop))


def _packed(parts: Sequence[Piece], size_of: Callable[[Piece], int], most: int) -> list[list[Piece]]:
    """`parts` in order in as few groups as go with sizes of at most `most` (a single one may be larger)."""
    groups: list[list[Piece]] = []
    room = 0
    for part in parts:
        size = size_of(part)
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(part)
        room -= size
    return groups
