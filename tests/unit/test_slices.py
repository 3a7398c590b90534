"""Cuts: the same rows on every rank, tokens and requests tiled exactly, and every rank's own parts inside them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.overlap.slices import UBatchSlice, cut_batch, equal_bounds, fitted_bounds, scaled_bounds

LENS = st.lists(st.integers(1, 9), max_size=12)


def sizes_of(ends: tuple[int, ...]) -> list[int]:
    return [end - begin for begin, end in pairwise((0, *ends))]


def test_equal_parts_and_the_rest_goes_last() -> None:
    assert equal_bounds(10, 3) == (3, 6, 10)
    assert equal_bounds(8, 2) == (4, 8)
    assert equal_bounds(1, 2) == (0, 1)
    assert equal_bounds(15, 2, unit=3) == (6, 15)  # five requests of three tokens: two and three


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


def assert_tiles(parts: tuple[UBatchSlice, ...], lens: list[int], total: int) -> None:
    """Every token of 0 … total − 1 in exactly one part, in order, and with it its request, if it has one."""
    owner = [i for i, n in enumerate(lens) for _ in range(n)]
    assert [t for part in parts for t in range(part.token_start, part.token_stop)] == list(range(total))
    for part in parts:
        inside = owner[part.token_start : part.token_stop]
        assert list(range(part.request_start, part.request_stop)) == sorted(set(inside))


@st.composite
def ends_of(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    """Any ends of `count` parts of `total` tokens."""
    inner = draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1))
    return (*sorted(inner), total)


@settings(max_examples=300, deadline=None)
@given(LENS, st.integers(0, 20), st.integers(1, 4), st.data())
def test_slices_tile(lens: list[int], more: int, n: int, data: st.DataObject) -> None:
    """At equal numbers of tokens, and at any others, also where a rank's own tokens are cut elsewhere."""
    num_tokens = sum(lens)
    bounds = data.draw(st.one_of(st.just(equal_bounds(num_tokens + more, n)), ends_of(num_tokens + more, n)))
    own = data.draw(st.one_of(st.none(), ends_of(num_tokens, n)))
    cut = cut_batch(lens, bounds, own)
    assert tuple(part.token_stop for part in cut.padded) == bounds
    assert_tiles(cut.padded, lens, num_tokens + more)
    assert_tiles(cut.real, lens, num_tokens)
    if own is None:
        for real, padded in zip(cut.real, cut.padded, strict=True):
            assert real.token_start == min(padded.token_start, num_tokens)
    else:
        assert tuple(part.token_stop for part in cut.real) == own


@pytest.mark.parametrize("num_ubatches", [2, 3, 4])
@pytest.mark.parametrize("unit", [1, 2, 3])
def test_sizes_differ_only_in_the_last(num_ubatches: int, unit: int) -> None:
    for padded in range(unit, 70 * unit, unit):
        sizes = sizes_of(equal_bounds(padded, num_ubatches, unit))
        assert len(set(sizes[:-1])) == 1
        assert sizes[0] <= sizes[-1] < sizes[0] + num_ubatches * unit
        assert all(size % unit == 0 for size in sizes)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 4), st.integers(2, 4), st.data())
def test_padded_parts_have_the_wished_proportions_and_hold_the_wish(
    units: int, more: int, unit: int, n: int, data: st.DataObject
) -> None:
    wish = tuple(unit * end for end in data.draw(ends_of(units, n)))
    padded = (units + more) * unit
    bounds = scaled_bounds(wish[:-1], units * unit, padded, unit)
    assert bounds[-1] == padded
    for own, part in zip(sizes_of(wish), sizes_of(bounds), strict=True):
        assert part >= own
        assert part % unit == 0
        assert abs(part - own * padded / (units * unit)) < unit  # rounded, no more
    assert fitted_bounds(wish[:-1], units * unit, bounds) == wish


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 12), st.integers(0, 6), st.integers(1, 4), st.data())
def test_a_rank_fits_into_any_padded_parts(num_tokens: int, more: int, n: int, data: st.DataObject) -> None:
    bounds = data.draw(ends_of(num_tokens + more, n))
    cuts = data.draw(ends_of(num_tokens, n))[:-1]
    ends = fitted_bounds(cuts, num_tokens, bounds)
    rooms = sizes_of(bounds)
    assert ends[-1] == num_tokens
    assert all(0 <= size <= room for size, room in zip(sizes_of(ends), rooms, strict=True))
    # Part after part: no other end of this one would be nearer to the wish and leave a way to go on.
    for i, cut in enumerate(cuts):
        first, room_after = (0, *ends)[i], sum(rooms[i + 1 :])
        possible = [e for e in range(first, first + rooms[i] + 1) if e <= num_tokens <= e + room_after]
        assert abs(ends[i] - cut) == min(abs(e - cut) for e in possible)


@settings(deadline=None)
@given(LENS, st.integers(1, 4), st.integers(0, 5), st.integers(2, 4))
def test_requests_of_a_uniform_decode_stay_whole(lens: list[int], query: int, more: int, n: int) -> None:
    queries = [query] * len(lens)
    starts = [0, *accumulate(queries)]
    cut = cut_batch(queries, equal_bounds((len(lens) + more) * query, n, query))
    assert all(part.token_start in starts and part.token_stop in starts for part in cut.real)
