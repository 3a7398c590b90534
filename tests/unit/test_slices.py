"""Cuts: the same rows on every rank, tokens and requests tiled exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.overlap.slices import cut_batch, equal_bounds

LENS = st.lists(st.integers(1, 9), max_size=12)


def test_equal_parts_and_the_rest_goes_last() -> None:
    assert equal_bounds(10, 3) == (3, 6, 10)
    assert equal_bounds(8, 2) == (4, 8)
    assert equal_bounds(1, 2) == (0, 1)


def test_a_cut_inside_a_request_is_in_both() -> None:
    cut = cut_batch([3, 5, 2], (4, 10))
    first, second = cut.real
    assert (first.token_start, first.token_stop, first.request_start, first.request_stop) == (0, 4, 0, 2)
    assert (second.token_start, second.token_stop, second.request_start, second.request_stop) == (4, 10, 1, 3)


def test_a_rank_with_few_tokens_has_empty_ubatches() -> None:
    first, second = cut_batch([1], (32, 64)).real
    assert (first.num_tokens, first.num_requests) == (1, 1)
    assert (second.num_tokens, second.num_requests) == (0, 0)
    assert all(part.num_tokens == 0 and part.num_requests == 0 for part in cut_batch([], (2, 4)).real)


@given(LENS, st.integers(0, 20), st.integers(1, 4))
def test_slices_tile(lens: list[int], more: int, num_ubatches: int) -> None:
    num_tokens = sum(lens)
    padded = num_tokens + more
    bounds = equal_bounds(padded, num_ubatches)
    cut = cut_batch(lens, bounds)
    owner = [i for i, n in enumerate(lens) for _ in range(n)]
    position = 0
    for real, full, end in zip(cut.real, cut.padded, bounds, strict=True):
        assert full.token_stop == end
        assert full.token_start == min(position, full.token_start)
        assert real.token_start == min(position, num_tokens)
        position = end
        inside = owner[real.token_start : real.token_stop]
        assert list(range(real.request_start, real.request_stop)) == sorted(set(inside))
    assert position == padded
    assert sum(real.num_tokens for real in cut.real) == num_tokens
    assert sum(full.num_tokens for full in cut.padded) == padded


@pytest.mark.parametrize("num_ubatches", [2, 3, 4])
def test_sizes_differ_only_in_the_last(num_ubatches: int) -> None:
    for padded in range(1, 70):
        sizes = [s.num_tokens for s in cut_batch([1] * padded, equal_bounds(padded, num_ubatches)).padded]
        assert len(set(sizes[:-1])) == 1
        assert sizes[-1] >= sizes[0]
