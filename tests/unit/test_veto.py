"""The veto against an independent model of a split step's writes and reads: no reader runs before its writer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.veto import CacheGroup, has_hazard

BLOCK = 4
Part = tuple[int, int]


def runs_wrong(parts: list[Part], block_ids: list[list[int]], bounds: tuple[int, ...]) -> bool:
    """Play one layer: ubatch after ubatch writes its tokens' slots, then attends over each request's whole blocks.

    Wrong: a slot of a block that its request did not compute itself is read before this step's writer wrote it.
    """
    written_by: dict[int, tuple[int, int]] = {}  # slot → (request, its order) of this step's writes
    tokens = [(r, start + i) for r, (start, count) in enumerate(parts) for i in range(count)]
    for r, position in tokens:
        slot = block_ids[r][position // BLOCK] * BLOCK + position % BLOCK
        written_by.setdefault(slot, (r, 0))
    done: set[int] = set()
    begin = 0
    for end in bounds:
        mine = tokens[begin:end]
        done |= {block_ids[r][p // BLOCK] * BLOCK + p % BLOCK for r, p in mine}
        for r in {r for r, _ in mine}:
            for block in block_ids[r][: parts[r][0] // BLOCK]:
                for slot in range(block * BLOCK, block * BLOCK + BLOCK):
                    if slot in written_by and slot not in done:
                        return True
        begin = end
    return False


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Part], list[list[int]]]:
    """Requests that own blocks of their own, or start with whole blocks that another one writes in this step."""
    count = draw(st.integers(1, 5))
    parts, block_ids = [], []
    next_block = 0
    for _ in range(count):
        start, num_tokens = draw(st.integers(0, 9)), draw(st.integers(1, 9))
        needed = -(-(start + num_tokens) // BLOCK)
        parts.append((start, num_tokens))
        block_ids.append(list(range(next_block, next_block + needed)))
        next_block += needed
    for reader in range(count):
        writer = draw(st.integers(0, count - 1))
        shared = min(parts[reader][0] // BLOCK, len(block_ids[writer]))
        if writer != reader and draw(st.booleans()):
            block_ids[reader][:shared] = block_ids[writer][:shared]
    return parts, block_ids


@settings(max_examples=500, deadline=None)
@given(batches(), st.integers(2, 4))
def test_what_is_not_refused_never_reads_too_early(batch: tuple[list[Part], list[list[int]]], n: int) -> None:
    parts, block_ids = batch
    if not has_hazard(parts, [CacheGroup(BLOCK, block_ids)]):
        bounds = equal_bounds(sum(count for _, count in parts), n)
        assert not runs_wrong(parts, block_ids, bounds)
        assert cut_batch([count for _, count in parts], bounds).real


def test_a_reader_before_its_writer_is_refused_whatever_its_length() -> None:
    writer, reader = (0, 8), (4, 1)
    assert has_hazard([reader, writer], [CacheGroup(BLOCK, [[0, 9], [0, 1]])])
    assert runs_wrong([reader, writer], [[0, 9], [0, 1]], (1, 9))


def test_a_reader_after_its_writer_is_not() -> None:
    assert not has_hazard([(0, 8), (4, 1)], [CacheGroup(BLOCK, [[0, 1], [0, 9]])])


def test_a_half_filled_tail_is_ones_own() -> None:
    assert not has_hazard([(6, 1), (2, 4)], [CacheGroup(BLOCK, [[0, 1], [2, 3]])])
    assert not has_hazard([(4, 3)], [CacheGroup(BLOCK, [[0, 1]])])


def test_any_cache_group_counts() -> None:
    clean, shared = [[0, 9], [1, 2]], [[0, 9], [0, 1]]
    assert has_hazard([(4, 1), (0, 8)], [CacheGroup(BLOCK, clean), CacheGroup(BLOCK, shared)])
