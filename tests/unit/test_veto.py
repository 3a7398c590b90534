"""The veto against an independent model of a split step's writes and reads: no reader runs before its writer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config.engine import OverlapConfig
from hocket.overlap.cost import TokenCost, wished_cuts
from hocket.overlap.slices import equal_bounds
from hocket.overlap.veto import CacheGroup, has_hazard, prefix_hazard
from hocket.overlap.vote import Reason, decide, facts
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, ScheduledRequest

BLOCK = 4
NUM_LAYERS = 2
Part = tuple[int, int]


class Layer:
    """One layer's cache of one group, by slot: a slot that this step writes holds nothing until then."""

    def __init__(self, parts: list[Part], group: CacheGroup) -> None:
        self._group = group
        self._parts = parts
        self._missing = {
            self._slot(r, position)
            for r, (start, count) in enumerate(parts)
            for position in range(start, start + count)
        }

    def _slot(self, request: int, position: int) -> int:
        size = self._group.block_size
        return self._group.block_ids[request][position // size] * size + position % size

    def run(self, tokens: Sequence[tuple[int, int]]) -> bool:
        """A ubatch of (request, position) writes, then attends; whether all that it reads has been written.

        A token reads its whole context: what its request computed in steps before, and in this one up to itself.
        """
        self._missing -= {self._slot(r, position) for r, position in tokens}
        return all(self._slot(r, earlier) not in self._missing for r, position in tokens for earlier in range(position))


def runs_wrong(parts: list[Part], groups: Sequence[CacheGroup], ends: Sequence[int], order: Sequence[int]) -> bool:
    """Whether some token reads what is not there yet. `order`: which ubatch runs its next layer, one after another."""
    tokens = [(r, start + i) for r, (start, count) in enumerate(parts) for i in range(count)]
    ubatches = [tokens[begin:end] for begin, end in pairwise((0, *ends))]
    layers = [[Layer(parts, group) for group in groups] for _ in range(NUM_LAYERS)]  # by layer, then by group
    done = [0] * len(ubatches)
    for idx in order:
        if not all(layer.run(ubatches[idx]) for layer in layers[done[idx]]):
            return True
        done[idx] += 1
    assert done == [NUM_LAYERS] * len(ubatches)
    return False


@st.composite
def orders(draw: st.DrawFn, n: int) -> list[int]:
    """Any order that runs each ubatch's layers in turn, and in each layer the ubatches in turn."""
    done = [0] * n
    order = []
    while min(done) < NUM_LAYERS:
        ready = [i for i in range(n) if done[i] < NUM_LAYERS and (i == 0 or done[i] < done[i - 1])]
        order.append(draw(st.sampled_from(ready)))
        done[order[-1]] += 1
    return order


@st.composite
def steps(draw: st.DrawFn, most_groups: int = 2) -> tuple[list[Part], list[CacheGroup]]:
    """Requests that own blocks of their own, or start with whole blocks that another one writes in this step or has
    written before; in each cache group other ones, and blocks of another size."""
    parts = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5))
    groups = []
    for size in draw(st.lists(st.sampled_from([2, BLOCK]), min_size=1, max_size=most_groups)):
        next_block = 0
        block_ids: list[list[int]] = []
        for start, count in parts:
            needed = -(-(start + count) // size)
            block_ids.append(list(range(next_block, next_block + needed)))
            next_block += needed
        for reader, (start, _) in enumerate(parts):
            writer = draw(st.integers(0, len(parts) - 1))
            shared = min(start // size, len(block_ids[writer]))
            if writer != reader and draw(st.booleans()):
                block_ids[reader][:shared] = block_ids[writer][:shared]
        groups.append(CacheGroup(size, block_ids))
    return parts, groups


@st.composite
def ends_of(draw: st.DrawFn, total: int, n: int) -> tuple[int, ...]:
    return (*sorted(draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1))), total)


@settings(max_examples=400, deadline=None)
@given(steps(), st.integers(2, 4), st.data())
def test_what_is_not_refused_never_reads_too_early(
    step: tuple[list[Part], list[CacheGroup]], n: int, data: st.DataObject
) -> None:
    """At equal cuts and at any others, in any legal order of the ubatches' layers."""
    parts, groups = step
    total = sum(count for _, count in parts)
    ends = data.draw(st.one_of(st.just(equal_bounds(total, n)), ends_of(total, n)))
    if not has_hazard(parts, groups):
        assert not runs_wrong(parts, groups, ends, data.draw(orders(n)))


@settings(max_examples=300, deadline=None)
@given(steps())
def test_what_is_refused_reads_too_early_at_some_cut(step: tuple[list[Part], list[CacheGroup]]) -> None:
    parts, groups = step
    total = sum(count for _, count in parts)
    in_turn = [i for _ in range(NUM_LAYERS) for i in range(2)]
    wrong = any(runs_wrong(parts, groups, (cut, total), in_turn) for cut in range(total + 1))
    assert has_hazard(parts, groups) == wrong


def batch_of(parts: list[Part], group: CacheGroup) -> Batch:
    rows = tuple(
        ScheduledRequest(
            request=Request(EngineRequest(str(i), [1] * (start + count), SamplingParams())),
            start=start,
            num_tokens=count,
            needs_sample=True,
            is_prefill=True,
            block_ids=list(group.block_ids[i]),
        )
        for i, (start, count) in enumerate(parts)
    )
    total = sum(count for _, count in parts)
    return Batch(rows, total, total)


@settings(max_examples=300, deadline=None)
@given(steps(most_groups=1), steps(most_groups=1), st.integers(2, 4), st.sampled_from(["equal", "cost"]), st.data())
def test_no_step_that_the_ranks_split_reads_too_early(
    step: tuple[list[Part], list[CacheGroup]],
    other: tuple[list[Part], list[CacheGroup]],
    n: int,
    cut: str,
    data: st.DataObject,
) -> None:
    """From batches to cuts as two ranks decide them, each with its own hazards and its own wish."""
    policy = OverlapConfig(num_ubatches=n, force_split=True, cut=cut)
    cost = TokenCost(linear=10, decode_context=3, prefill_context=5)
    table = []
    for parts, [group] in (step, other):
        batch = batch_of(parts, group)
        refusal = Reason.PREFIX_HAZARD if prefix_hazard(batch, group.block_size) else None
        wish = wished_cuts(batch, cost, n) if cut == "cost" else None
        table.append(facts(batch, step=0, digest=0, num_unfinished=1, refusal=refusal, wish=wish))
    plan = decide(table, policy)
    if plan.reason is Reason.SPLIT:
        for rank, (parts, groups) in enumerate((step, other)):
            assert not runs_wrong(parts, groups, plan.own_bounds(rank), data.draw(orders(n)))


def test_a_reader_before_its_writer_is_refused_whatever_its_length() -> None:
    parts, group = [(4, 1), (0, 8)], CacheGroup(BLOCK, [[0, 9], [0, 1]])
    assert has_hazard(parts, [group])
    assert runs_wrong(parts, [group], (1, 9), [0, 1, 0, 1])


def test_a_reader_after_its_writer_is_not() -> None:
    assert not has_hazard([(0, 8), (4, 1)], [CacheGroup(BLOCK, [[0, 1], [0, 9]])])


def test_a_half_filled_tail_is_ones_own() -> None:
    assert not has_hazard([(6, 1), (2, 4)], [CacheGroup(BLOCK, [[0, 1], [2, 3]])])
    assert not has_hazard([(4, 3)], [CacheGroup(BLOCK, [[0, 1]])])


def test_any_cache_group_counts() -> None:
    clean, shared = [[0, 9], [1, 2]], [[0, 9], [0, 1]]
    assert has_hazard([(4, 1), (0, 8)], [CacheGroup(BLOCK, clean), CacheGroup(BLOCK, shared)])
    assert not has_hazard([(4, 1), (0, 8)], [CacheGroup(BLOCK, clean), CacheGroup(2, [[0, 1, 9], [2, 3, 4, 5]])])
