"""Block ownership, names and eviction, without requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cache.block_pool import BlockPool


def test_blank_blocks_are_given_out_lowest_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.num_free == 1
    assert [pool.ref_count(block_id) for block_id in range(4)] == [1, 1, 1, 0]


def test_released_named_block_is_found_and_shared_again() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.name(block_id, b"a")
    pool.release([block_id])
    assert pool.num_free == 2
    assert pool.find(b"a") == block_id
    pool.share([block_id])
    assert pool.ref_count(block_id) == 1
    assert pool.num_free == 1


def test_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(1)
    block_ids = pool.take(1)
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 0
    pool.release(block_ids)
    assert pool.num_free == 1


def test_blank_goes_before_kept_and_kept_by_last_release() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.take(4)
    for block_id, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.name(block_id, name)
    pool.release([b])
    pool.release([a])
    pool.release([d])
    pool.release([c])
    pool.share([b])  # used once more: now the last released
    pool.release([b])
    assert pool.take(1) == [d]
    assert [pool.take(1)[0] for _ in range(3)] == [a, c, b]
    assert pool.num_named == 0


def test_a_sequence_is_evicted_from_its_end() -> None:
    pool = BlockPool(3)
    block_ids = pool.take(3)
    for idx, block_id in enumerate(block_ids):
        pool.name(block_id, bytes([idx]))
    pool.release(block_ids)
    pool.take(1)
    assert pool.find(b"\x02") is None
    assert pool.find(b"\x01") == block_ids[1]


def test_names_are_unique_and_the_first_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.name(first, b"a")
    pool.name(second, b"a")
    pool.name(first, b"b")
    assert pool.find(b"a") == first
    assert pool.find(b"b") is None
    pool.release([second])
    assert pool.take(1) == [second]


def test_forget_owned_and_kept() -> None:
    pool = BlockPool(2)
    owned, kept = pool.take(2)
    pool.name(owned, b"owned")
    pool.name(kept, b"kept")
    pool.release([kept])
    for name in (b"owned", b"kept", b"never"):
        pool.forget(name)
        assert pool.find(name) is None
    assert pool.ref_count(owned) == 1
    assert pool.take(1) == [kept]


def test_forget_all() -> None:
    pool = BlockPool(3)
    block_ids = pool.take(2)
    pool.name(block_ids[0], b"a")
    pool.name(block_ids[1], b"b")
    pool.release(block_ids[1:])
    pool.forget_all()
    assert (pool.num_named, pool.num_free) == (0, 2)


def test_misuse_is_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="named without an owner"):
        pool.name(0, b"a")
    block_ids = pool.take(1)
    with pytest.raises(AssertionError, match="1 blocks taken, 0 free"):
        pool.take(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block_ids)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["take", "share", "release", "name", "forget"]), st.integers(0, 30))),
)
def test_counts_and_names_match_a_plain_model(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Model: a counter per block and a dict of names; which free block is taken is the pool's choice."""
    pool = BlockPool(num_blocks)
    counts = [0] * num_blocks
    names: dict[bytes, int] = {}
    for action, number in actions:
        block_id, name = number % num_blocks, bytes([number % 5])
        if action == "take" and 0 in counts:
            (block_id,) = pool.take(1)
            assert counts[block_id] == 0
            has_blank = any(count == 0 and i not in names.values() for i, count in enumerate(counts))
            assert not (has_blank and block_id in names.values())
            counts[block_id] = 1
            names = {key: value for key, value in names.items() if value != block_id}
        elif action == "share" and (counts[block_id] > 0 or block_id in names.values()):
            pool.share([block_id])
            counts[block_id] += 1
        elif action == "release" and counts[block_id] > 0:
            pool.release([block_id])
            counts[block_id] -= 1
        elif action == "name" and counts[block_id] > 0:
            pool.name(block_id, name)
            if name not in names and block_id not in names.values():
                names[name] = block_id
        elif action == "forget":
            pool.forget(name)
            names.pop(name, None)
        assert [pool.ref_count(i) for i in range(num_blocks)] == counts
        assert pool.num_free == counts.count(0)
        assert pool.num_named == len(names)
        assert all(pool.find(bytes([i])) == names.get(bytes([i])) for i in range(5))
