"""Prefix names and block tables, without a scheduler."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cache.manager import KVCacheManager
from hocket.cache.prefix import ROOT_HASH, extend_hashes, hash_block
from hocket.errors import ConfigError
from hocket.request import EngineRequest, Request, SamplingParams

COUNTER = iter(range(10**9))


def make_request(token_ids: list[int], prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Request(EngineRequest(f"r{next(COUNTER)}", token_ids, params))


def compute(cache: KVCacheManager, request: Request) -> bool:
    """Admits the request and computes all its tokens at once."""
    if not cache.admit(request, cache.lookup(request)):
        return False
    num_new_tokens = request.num_tokens - request.num_computed_tokens
    assert num_new_tokens >= 1
    assert cache.allocate(request, num_new_tokens)
    request.num_computed_tokens = request.num_tokens
    return True


def test_hash_is_stable_and_chained() -> None:
    assert (
        hash_block(ROOT_HASH, [1, 2, 3, 4]).hex() == "70174ad8f991d10f4d8336343865a405a0ac1da5f639036d77b840b064138bbe"
    )
    assert hash_block(hash_block(ROOT_HASH, [1]), [2]) != hash_block(ROOT_HASH, [2])
    assert hash_block(ROOT_HASH, [1, 2]) != hash_block(ROOT_HASH, [2, 1])


def test_hash_does_not_depend_on_the_process() -> None:
    code = "from hocket.cache.prefix import *; print(hash_block(ROOT_HASH, [5, 6]).hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == hash_block(ROOT_HASH, [5, 6]).hex()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**31), max_size=20), st.integers(1, 5), st.data())
def test_extending_hashes_in_steps_equals_at_once(token_ids: list[int], block_size: int, data: st.DataObject) -> None:
    num_blocks = len(token_ids) // block_size
    at_once: list[bytes] = []
    extend_hashes(at_once, token_ids, block_size, num_blocks)
    in_steps: list[bytes] = []
    for stop in [*sorted(data.draw(st.lists(st.integers(0, num_blocks), max_size=4))), num_blocks]:
        extend_hashes(in_steps, token_ids, block_size, stop)
    assert in_steps == at_once
    assert len(set(at_once)) == num_blocks


def test_known_prefix_is_shared() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    first, second = make_request([*range(10)]), make_request([*range(8), 99, 98, 97])
    assert compute(cache, first)
    assert compute(cache, second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert (cache.num_prefix_queries, cache.num_prefix_hits) == (21, 8)
    assert cache.num_free_blocks == 8 - 4


def test_prefix_survives_its_request_until_evicted() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=2)
    first = make_request([1, 2, 3, 4, 5])
    assert compute(cache, first)
    cache.free(first)
    assert cache.usage == 0.0
    again = make_request([1, 2, 3, 4, 5])
    assert compute(cache, again)
    assert again.num_cached_tokens == 4
    cache.free(again)
    other = make_request([9] * 6)  # takes the two blank blocks, then the later of the two known ones
    assert compute(cache, other)
    assert len(cache.lookup(make_request([1, 2, 3, 4, 5]))) == 1


def test_one_token_is_left_to_compute() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    assert compute(cache, make_request([*range(8)]))
    again = make_request([*range(8)])
    assert compute(cache, again)
    assert again.num_cached_tokens == 4
    longer = make_request([*range(9)])
    assert compute(cache, longer)
    assert longer.num_cached_tokens == 8


def test_half_filled_blocks_are_not_shared() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    assert compute(cache, make_request([1, 2, 3]))
    assert cache.lookup(make_request([1, 2, 3, 4, 5])) == []


def test_same_block_after_another_prefix_is_not_a_hit() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=2)
    assert compute(cache, make_request([1, 1, 7, 7, 0]))
    assert cache.lookup(make_request([2, 2, 7, 7, 0])) == []


def test_prompt_logprobs_write_but_never_read() -> None:
    cache = KVCacheManager(num_blocks=9, block_size=2)
    assert compute(cache, make_request([1, 2, 3, 4, 5], prompt_logprobs=0))
    assert cache.lookup(make_request([1, 2, 3, 4, 5], prompt_logprobs=0)) == []
    assert (cache.num_prefix_queries, cache.num_prefix_hits) == (0, 0)
    assert len(cache.lookup(make_request([1, 2, 3, 4, 5]))) == 2


def test_caching_off() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=2, enable_prefix_caching=False)
    assert compute(cache, make_request([1, 2, 3, 4]))
    again = make_request([1, 2, 3, 4])
    assert compute(cache, again)
    assert (again.num_cached_tokens, again.block_hashes) == (0, [])
    assert cache.num_prefix_queries == 0


def test_refusals_change_nothing() -> None:
    cache = KVCacheManager(num_blocks=3, block_size=2)
    request = make_request([1, 2, 3, 4])
    assert compute(cache, request)
    too_long = make_request([1, 2, 5, 6, 7, 8])
    assert not cache.admit(too_long, cache.lookup(too_long))
    assert (too_long.block_ids, too_long.num_computed_tokens, cache.num_prefix_queries) == ([], 0, 4)
    table = list(request.block_ids)
    assert not cache.allocate(request, 3)
    assert request.block_ids == table
    assert cache.allocate(request, 2)
    assert cache.num_free_blocks == 0


def test_hits_that_nobody_owns_are_not_counted_as_room() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=2)
    first = make_request([1, 2, 3])
    assert compute(cache, first)
    cache.free(first)
    request = make_request([1, 2, 3, 4, 5])  # one hit, two more blocks, but only one other is free
    assert not cache.admit(request, cache.lookup(request))
    assert cache.num_free_blocks == 2


def test_free_is_idempotent_and_old_tables_stay() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=2)
    request = make_request([1, 2, 3])
    cache.free(request)
    assert compute(cache, request)
    table = request.block_ids
    cache.free(request)
    cache.free(request)
    assert (cache.num_free_blocks, request.block_ids, len(table)) == (2, [], 2)


def test_token_in_flight_is_named_one_step_later() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=2)
    request = make_request([1, 2, 3])
    assert compute(cache, request)
    assert cache.allocate(request, 1)  # the token being sampled: fills block 1, but has no id yet
    request.num_computed_tokens = 4
    assert len(cache.lookup(make_request([1, 2, 3, 4, 5]))) == 1
    request.token_ids.append(4)
    assert cache.allocate(request, 1)
    assert cache.lookup(make_request([1, 2, 3, 4, 5])) == request.block_ids[:2]


@pytest.mark.parametrize("is_freed_first", [False, True])
def test_forget_takes_back_exactly_what_a_step_filled(is_freed_first: bool) -> None:
    cache = KVCacheManager(num_blocks=8, block_size=2)
    request = make_request([*range(9)])
    assert cache.admit(request, cache.lookup(request))
    assert cache.allocate(request, 3)
    request.num_computed_tokens = 3
    assert cache.allocate(request, 4)
    if is_freed_first:
        cache.free(request)
    cache.forget(request, 3, 7)
    assert len(cache.lookup(make_request([*range(9)]))) == 1
    cache.free(request)
    assert cache.num_free_blocks == 8


def test_clear_prefixes() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=2)
    request = make_request([*range(6)])
    assert compute(cache, request)
    cache.clear_prefixes()
    assert cache.lookup(make_request([*range(6)])) == []
    assert cache.num_free_blocks == 5


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_wrong_sizes(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVCacheManager(num_blocks, block_size)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=12), st.integers(1, 4), st.booleans())
def test_hits_equal_brute_force_over_token_prefixes(prompts: list[list[int]], block_size: int, is_freed: bool) -> None:
    """With room for everything, a hit is the longest prefix of whole blocks seen before, short of the last token."""
    cache = KVCacheManager(num_blocks=200, block_size=block_size)
    block_of: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        request = make_request(prompt)
        prefixes = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        expected = [block_of[prefix] for prefix in prefixes if prefix in block_of and len(prefix) < len(prompt)]
        assert cache.lookup(request) == expected
        assert compute(cache, request)
        assert request.block_ids[: len(expected)] == expected
        for prefix, block_id in zip(prefixes, request.block_ids, strict=False):
            block_of.setdefault(prefix, block_id)
        if is_freed:
            cache.free(request)
            assert cache.num_free_blocks == 200
