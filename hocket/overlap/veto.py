"""Whether a split could let a request read KV blocks before another one has written them. Integers only.

Unsplit, each layer writes all keys and values of the step before anyone reads. Split, a later ubatch writes after an
earlier one has read. In every layer ubatch i writes before ubatch i + 1 attends, and inside one ubatch writes come
first; so the danger is only a reader whose tokens stand before the writer's. Tokens keep their order however they are
cut, at equal numbers or by cost: where the reader stands after the writer, each of its ubatches is the writer's last or
a later one. So the answer does not depend on the cut, which is not known yet when a rank has to give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.scheduler.batch import Batch


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV-cache group's view of a batch: its block size, and each request's block ids in batch order."""

    block_size: int
    block_ids: Sequence[Sequence[int]]


def prefix_hazard(batch: Batch, block_size: int) -> bool:
    """Whether a cut of `batch` anywhere could let a reader run before its writer."""
    parts = [(row.start, row.num_tokens) for row in batch.requests]
    return has_hazard(parts, [CacheGroup(block_size, [row.block_ids for row in batch.requests])])


def has_hazard(parts: Sequence[tuple[int, int]], groups: Iterable[CacheGroup]) -> bool:
    """`parts`: (tokens computed before, tokens of this step) of each request, in the order of their tokens.

    A request reads its whole blocks computed before (its half-filled tail block is its own) and writes those from
    there to its last token. Any request that reads counts, whatever its query length.
    """
    if len(parts) < 2:
        return False
    return any(_group_has_hazard(parts, group) for group in groups)


def _group_has_hazard(parts: Sequence[tuple[int, int]], group: CacheGroup) -> bool:
    read_before: set[int] = set()
    size = group.block_size
    for (start, num_tokens), block_ids in zip(parts, group.block_ids, strict=True):
        first, last = start // size, -(-(start + num_tokens) // size)
        # A block that an earlier request reads and this one writes; its own reads are not in the set yet.
        if not read_before.isdisjoint(block_ids[first:last]):
            return True
        read_before.update(block_ids[:first])
    return False
