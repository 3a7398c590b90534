"""Which rank gets a request: fewest tokens to compute, where prefixes in caches count as computed."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.balance import MAX_NAMES, MIN_PREFIX_TOKENS, Balance, PrefixMemory
from hocket.outputs import TokenOutput
from hocket.request import EngineRequest, SamplingParams

BLOCK = 16
CHUNK = MIN_PREFIX_TOKENS
NAMES = count()


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def request(token_ids: list[int], max_tokens: int = 8, **params: object) -> EngineRequest:
    given = {"max_tokens": max_tokens} | params
    return EngineRequest(
        request_id=str(next(NAMES)),
        prompt_token_ids=token_ids,
        params=SamplingParams(**given),  # type: ignore[arg-type]
        eos_token_ids=[],
        bad_words_ids=[],
        max_tokens=max_tokens,
    )


def balance(num_ranks: int = 2, *, max_names: int = 1000, prefixes: bool = True) -> Balance:
    memory = PrefixMemory(num_ranks, BLOCK, max_names) if prefixes else None
    return Balance(num_ranks, by_tokens=True, prefixes=memory)


def gain(balance: Balance, request: EngineRequest, num_tokens: int, reason: str | None = None) -> None:
    balance.computed(TokenOutput(request_id=request.request_id, token_ids=[1] * num_tokens))
    if reason is not None:
        balance.ended(request.request_id, reason)


@pytest.mark.parametrize(("prefixes", "expected"), [(True, 1), (False, 0)])
def test_a_conversation_goes_on_where_it_began(prefixes: bool, expected: int) -> None:
    ranks = balance(prefixes=prefixes)
    first, second = request(prompt(1, 200)), request(prompt(2, 200))
    assert [ranks.place(one).rank for one in (first, second)] == [0, 1]
    for one in (first, second):
        gain(ranks, one, 8, "stop")
    placed = ranks.place(request(prompt(2, 200) + prompt(3, 50)))
    assert placed.rank == expected
    assert placed.num_known == (192 if prefixes else 0)  # whole chunks of 64
    assert ranks.loads[expected].num_tokens == 250 + 8 - placed.num_known


@pytest.mark.parametrize(("more", "expected"), [(-1, 1), (0, 0), (1, 0)])
def test_tokens_saved_count_as_much_as_tokens_to_do(more: int, expected: int) -> None:
    ranks = balance()
    known = prompt(1, 4 * CHUNK + 1)
    first = request(known)
    ranks.place(first, rank=1)
    gain(ranks, first, 8, "stop")
    ranks.place(request(prompt(2, 10), max_tokens=4 * CHUNK - 10 + more), rank=1)  # between equals requests count
    assert ranks.place(request(known)).rank == expected


def test_a_prefix_that_all_share_leaves_no_rank_idle() -> None:
    ranks, shared = balance(4), prompt(1, 1000)
    for number in range(100):
        ranks.place(request(shared + prompt(number, 20), max_tokens=30))
    tokens = [load.num_tokens for load in ranks.loads]
    assert max(tokens) - min(tokens) <= 1000 + 20 + 30
    assert min(load.num_requests for load in ranks.loads) >= 20
    assert sum(tokens) == 4 * 960 + 100 * (1020 - 960 + 30)  # each rank computes the shared chunks once


Placing = tuple[int, int, int, int, bool]
"""Which prefix, how much of it, how much behind it, limit of output, whether an earlier request ends first."""
PLACINGS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 700), st.integers(1, 90), st.integers(1, 300), st.booleans()),
    min_size=1,
    max_size=60,
)


def placed_by_rule(num_ranks: int, placings: list[Placing]) -> list[int]:
    """Places all; checks of each that the rank has at most as much more to do as it saves, and the sums at the end."""
    ranks, running, found = balance(num_ranks, max_names=12), [], []
    for number, (family, length, rest, max_tokens, ends) in enumerate(placings):
        if ends and running:
            one = running.pop(number % len(running))
            gain(ranks, one, 1 + number % 5, "length" if number % 2 else "stop")
        one = request(prompt(family, 700)[:length] + prompt(1000 + number, rest), max_tokens)
        before = [load.num_tokens for load in ranks.loads]
        placed = ranks.place(one)
        assert before[placed.rank] - min(before) <= placed.num_known < length + rest
        assert placed.num_known % CHUNK == 0
        running.append(one)
        found.append(placed.rank)
    for one in running:
        ranks.ended(one.request_id, "abort")
    assert [(load.num_requests, load.num_tokens) for load in ranks.loads] == [(0, 0)] * num_ranks
    assert not ranks.placed
    return found


@given(num_ranks=st.integers(1, 4), placings=PLACINGS)
@settings(max_examples=60, deadline=None)
def test_no_rank_gets_more_than_it_saves_and_the_same_goes_to_the_same(num_ranks: int, placings: list[Placing]) -> None:
    assert placed_by_rule(num_ranks, placings) == placed_by_rule(num_ranks, placings)


def test_what_was_used_last_is_remembered_of_a_prompt_its_beginning_longest() -> None:
    memory = PrefixMemory(2, BLOCK, max_names=5)
    names = {seed: memory.names(prompt(seed, 3 * CHUNK + 1)) for seed in range(3)}
    assert [len(found) for found in names.values()] == [3, 3, 3]
    memory.remember(0, names[0])
    memory.remember(0, names[1])
    assert [memory.num_known(0, names[seed]) for seed in range(3)] == [2 * CHUNK, 3 * CHUNK, 0]
    memory.remember(0, names[0])
    assert [memory.num_known(0, names[seed]) for seed in range(3)] == [3 * CHUNK, 2 * CHUNK, 0]
    memory.remember(0, memory.names(prompt(5, 100 * CHUNK)))
    assert memory.num_known(0, memory.names(prompt(5, 100 * CHUNK))) == 5 * CHUNK
    assert memory.num_known(1, names[0]) == 0


@pytest.mark.parametrize(("block_size", "chunk_size"), [(16, 64), (48, 96), (64, 64), (128, 128)])
def test_a_memory_is_as_large_as_the_caches(block_size: int, chunk_size: int) -> None:
    memory = PrefixMemory.of_caches([10 * chunk_size // block_size, 1000], block_size)
    assert memory.chunk_size == chunk_size
    long = memory.names(prompt(1, 50 * chunk_size))
    memory.remember(0, long)
    assert memory.num_known(0, long) == 10 * chunk_size
    assert PrefixMemory.of_caches([10**9] * 4, block_size)._max_names == MAX_NAMES // 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    memory = PrefixMemory(1, BLOCK, max_names=5)
    assert [len(memory.names([7] * length)) for length in (1, CHUNK, CHUNK + 1, 2 * CHUNK)] == [0, 0, 1, 1]


def test_whose_prompt_is_computed_in_any_case_goes_by_tokens_alone() -> None:
    ranks, known = balance(), prompt(1, 200)
    first = request(known)
    ranks.place(first, rank=1)
    gain(ranks, first, 8, "stop")
    placed = ranks.place(request(known, prompt_logprobs=1))
    assert (placed.rank, placed.num_known) == (0, 0)


def test_an_answer_without_a_limit_counts_as_others_did() -> None:
    ranks = balance(1)
    room = request([5], max_tokens=30_000)
    room.params.max_tokens = None
    assert ranks.place(room).num_output_tokens == 30_000  # nobody knows better yet
    gain(ranks, room, 40, "stop")
    limited, cut = request([5], max_tokens=500), request([5], max_tokens=2)
    assert ranks.place(limited).num_output_tokens == 500
    ranks.place(cut)
    gain(ranks, limited, 200, "stop")
    gain(ranks, cut, 2, "length")  # says nothing of how long it would have been
    again = request([5], max_tokens=30_000)
    again.params.max_tokens = None
    assert ranks.place(again).num_output_tokens == 50  # 40 and a sixteenth of the way to 200
    gain(ranks, again, 300)
    assert ranks.loads[0].num_tokens == 0


def test_without_tokens_requests_count() -> None:
    ranks = Balance(2)
    assert [ranks.place(request(prompt(1, n))).rank for n in (500, 5, 5, 5)] == [0, 1, 1, 0]


def test_ranks_behind_one_server_of_several_keep_their_numbers() -> None:
    ranks = Balance(2, by_tokens=True, prefixes=PrefixMemory(2, 16, 100), first_rank=4)
    first, second, third = (request(prompt(number, 200)) for number in (1, 2, 3))
    assert [ranks.place(one).rank for one in (first, second)] == [4, 5]
    assert ranks.place(third, rank=5).rank == 5
    assert [load.num_requests for load in ranks.loads] == [1, 2]
    assert ranks.loads[1].num_tokens == 2 * ranks.loads[0].num_tokens
    for one in (first, second, third):
        gain(ranks, one, 8, "stop")
    assert [(load.num_requests, load.num_tokens) for load in ranks.loads] == [(0, 0), (0, 0)]
    assert ranks.place(request(prompt(2, 200))).rank == 5  # which has its beginning
