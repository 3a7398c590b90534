"""The vote: a pure function of the table, the same on all ranks; disagreement is named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from batches import batch_of, batches
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config.engine import OverlapConfig
from hocket.errors import StepDesync
from hocket.overlap.cost import TokenCost, wished_cuts
from hocket.overlap.vote import INT32_MAX, NUM_ROWS, WISHED_CUTS, Reason, Row, StepPlan, facts
from hocket.overlap.vote import decide as decide_with
from hocket.scheduler.batch import Batch

OFF = OverlapConfig()
TWO = OverlapConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=8)


def decide(table: list[list[int]], policy: OverlapConfig = OFF) -> StepPlan:
    return decide_with(table, policy)


def column_of(*parts: tuple[int, int, int], step: int = 3, digest: int = 9) -> list[int]:
    return facts(batch_of(*parts), step=step, digest=digest, num_unfinished=len(parts))


def test_facts_of_decodes_are_uniform() -> None:
    column = column_of((4, 4, 1), (7, 9, 1))
    assert column[Row.TOKENS] == 2
    assert column[Row.REQUESTS] == 2
    assert column[Row.UNIFORM_QUERY] == 1
    assert column[Row.MAX_QUERY] == 1
    assert column[Row.CONTEXT_TOKENS] == 5 + 10


def test_a_prefill_of_one_token_is_not_a_decode() -> None:
    assert column_of((5, 4, 1))[Row.UNIFORM_QUERY] == 0
    assert column_of((5, 4, 1), (4, 4, 1))[Row.UNIFORM_QUERY] == 0


@pytest.mark.parametrize("refusal", [None, Reason.PREFIX_HAZARD])
def test_an_idle_rank_never_vetoes(refusal: Reason | None) -> None:
    column = facts(Batch(), step=3, digest=9, num_unfinished=0, refusal=refusal)
    assert column[Row.TOKENS] == 0
    assert column[Row.MAX_QUERY] == -1
    assert column[Row.MAY_SPLIT] == 1


def test_the_plan_has_every_ranks_tokens() -> None:
    plan = decide([column_of((4, 0, 4)), column_of(), column_of((4, 4, 1), (3, 3, 1))])
    assert plan.num_tokens == (4, 0, 2)
    assert plan.num_tokens_max == 4
    assert plan.num_ubatches == 1
    assert plan.reason is Reason.DISABLED
    assert plan.any_decodes
    assert not plan.is_idle
    assert not plan.is_finished


def test_nothing_to_run_is_not_nothing_left() -> None:
    waiting = facts(Batch(), step=3, digest=9, num_unfinished=1)
    plan = decide([column_of(), waiting])
    assert plan.is_idle
    assert not plan.is_finished
    assert decide([column_of(), column_of()]).is_finished


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_out_of_step_is_named(odd: int) -> None:
    table = [column_of(step=4 if rank == odd else 3) for rank in range(3)]
    with pytest.raises(StepDesync, match=f"rank {odd} has step 4 where the others have 3"):
        decide(table)
    table = [column_of(digest=8 if rank == odd else 9) for rank in range(3)]
    with pytest.raises(StepDesync, match=f"rank {odd} has configuration digest 8"):
        decide(table)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=NUM_ROWS, max_size=NUM_ROWS), min_size=1, max_size=8))
def test_arrival_times_never_change_the_plan(table: list[list[int]]) -> None:
    for column in table:
        column[Row.STEP] = column[Row.DIGEST] = 1
    moved = [[*column[:-1], (column[-1] + 12345) & 0x7FFFFFFF] for column in table]
    assert decide(table) == decide(moved)


def decodes(count: int) -> list[int]:
    return column_of(*[(4, 4, 1)] * count)


@pytest.mark.parametrize(
    ("table", "reason", "bounds"),
    [
        ([decodes(2), decodes(3)], Reason.SPLIT, (1, 3)),
        ([decodes(2), decodes(1)], Reason.BELOW_THRESHOLD, (2,)),
        ([decodes(2), column_of()], Reason.SPLIT, (1, 2)),  # an idle rank is left out of the test
        ([column_of(), column_of()], Reason.NO_WORK, (0,)),
        ([column_of((9, 0, 9)), decodes(8)], Reason.SPLIT, (4, 9)),  # not uniform: the other threshold counts
        ([column_of((9, 0, 9)), decodes(7)], Reason.BELOW_THRESHOLD, (9,)),
        ([column_of((7, 0, 7)), column_of()], Reason.BELOW_THRESHOLD, (7,)),
    ],
)
def test_when_a_step_is_split(table: list[list[int]], reason: Reason, bounds: tuple[int, ...]) -> None:
    plan = decide(table, TWO)
    assert plan.reason is reason
    assert plan.bounds == bounds


def test_of_several_refusals_the_lowest_code_wins() -> None:
    refusing = facts(batch_of((9, 0, 9)), step=3, digest=9, num_unfinished=1, refusal=Reason.PREFIX_HAZARD)
    assert decide([refusing, column_of((9, 0, 9))], TWO).reason is Reason.PREFIX_HAZARD
    assert decide([refusing, column_of((3, 0, 3))], TWO).reason is Reason.BELOW_THRESHOLD


def test_forced_splits_ignore_thresholds_but_not_hazards() -> None:
    forced = OverlapConfig(num_ubatches=3, force_split=True)
    assert decide([decodes(1), column_of()], forced).bounds == (0, 0, 1)
    refusing = facts(batch_of((9, 0, 9)), step=3, digest=9, num_unfinished=1, refusal=Reason.PREFIX_HAZARD)
    assert decide([refusing, decodes(1)], forced).reason is Reason.PREFIX_HAZARD


# -- any table ------------------------------------------------------------------------------------------------------

COST = TokenCost(linear=50, decode_context=3, prefill_context=2)
POLICIES = st.builds(
    OverlapConfig,
    num_ubatches=st.integers(1, 4),
    decode_token_threshold=st.integers(1, 12),
    prefill_token_threshold=st.integers(1, 12),
    force_split=st.booleans(),
    cut=st.sampled_from(["equal", "cost"]),
)
REFUSALS = st.sampled_from([None, None, None, Reason.PREFIX_HAZARD, Reason.RANK_CANNOT_SPLIT, Reason.NOT_PROFITABLE])
RANKS = st.lists(st.tuples(batches(), REFUSALS), min_size=1, max_size=4)
Ranks = list[tuple[Batch, Reason | None]]


def table_of(ranks: Ranks, policy: OverlapConfig) -> list[list[int]]:
    """Each rank's column, filled in as its engine does."""
    by_cost = policy.cut == "cost" and policy.num_ubatches > 1
    return [
        facts(
            batch,
            step=3,
            digest=9,
            num_unfinished=len(batch.requests),
            refusal=refusal,
            wish=wished_cuts(batch, COST, policy.num_ubatches) if by_cost else None,
        )
        for batch, refusal in ranks
    ]


def reason_by_the_contract(ranks: Ranks, policy: OverlapConfig) -> Reason | None:
    """Split if every rank with work may and has enough tokens; said of the batches, knowing no table.

    None: nobody has work, and there is nothing to split, whatever that is called.
    """
    working = [(batch, refusal) for batch, refusal in ranks if batch.requests]
    if not working:
        return None
    if policy.num_ubatches == 1:
        return Reason.DISABLED
    rows = [row for batch, _ in working for row in batch.requests]
    is_uniform = all(not row.is_prefill and row.num_tokens == rows[0].num_tokens for row in rows)
    enough = policy.decode_token_threshold if is_uniform else policy.prefill_token_threshold
    objections = [refusal for _, refusal in working if refusal is not None]
    if not policy.force_split and min(batch.num_tokens for batch, _ in working) < enough:
        objections.append(Reason.BELOW_THRESHOLD)
    return sorted(objections)[0] if objections else Reason.SPLIT


@settings(max_examples=300, deadline=None)
@given(RANKS, POLICIES)
def test_the_reason_is_the_contracts(ranks: Ranks, policy: OverlapConfig) -> None:
    plan = decide(table_of(ranks, policy), policy)
    expected = reason_by_the_contract(ranks, policy)
    assert plan.reason is expected or (expected is None and plan.is_idle and plan.reason is not Reason.SPLIT)
    assert plan.num_ubatches == (policy.num_ubatches if plan.reason is Reason.SPLIT else 1)
    assert plan.num_tokens == tuple(sum(row.num_tokens for row in batch.requests) for batch, _ in ranks)


@settings(max_examples=200, deadline=None)
@given(RANKS, POLICIES, st.integers(0, INT32_MAX))
def test_every_rank_decides_the_same(ranks: Ranks, policy: OverlapConfig, clock: int) -> None:
    """Whoever evaluates the table, whenever it came, and in whatever order the ranks stand in it."""
    table = table_of(ranks, policy)
    before = [list(column) for column in table]
    plans = [decide([[*column[:-1], (clock + rank) & INT32_MAX] for column in table], policy) for rank in range(4)]
    assert plans.count(plans[0]) == len(plans)
    assert table == before
    for order in itertools.permutations(range(len(ranks))):
        plan = decide([table[rank] for rank in order], policy)
        moved = replace(
            plans[0],
            num_tokens=tuple(plans[0].num_tokens[rank] for rank in order),
            wishes=tuple(plans[0].wishes[rank] for rank in order),
        )
        assert plan == moved


@settings(max_examples=200, deadline=None)
@given(RANKS, POLICIES, REFUSALS, st.data())
def test_idle_ranks_change_nothing(
    ranks: Ranks, policy: OverlapConfig, refusal: Reason | None, data: st.DataObject
) -> None:
    """Not the reason and not the cuts, wherever they stand; a refusal of theirs counts for nothing."""
    plan = decide(table_of(ranks, policy), policy)
    where = data.draw(st.integers(0, len(ranks)))
    joined = decide(table_of([*ranks[:where], (Batch(), refusal), *ranks[where:]], policy), policy)
    assert (joined.reason, joined.bounds) == (plan.reason, plan.bounds)
    assert joined.own_bounds(where) == (0,) * joined.num_ubatches


@settings(max_examples=300, deadline=None)
@given(RANKS, POLICIES)
def test_every_ranks_own_parts_fit_the_padded_ones(ranks: Ranks, policy: OverlapConfig) -> None:
    table = table_of(ranks, policy)
    plan = decide(table, policy)
    assert plan.bounds[-1] == plan.num_tokens_max == max(plan.num_tokens)
    rooms = sizes_of(plan.bounds)
    assert min(rooms) >= 0
    for rank, num_tokens in enumerate(plan.num_tokens):
        ends = plan.own_bounds(rank)
        assert ends[-1] == num_tokens
        assert all(0 <= size <= room for size, room in zip(sizes_of(ends), rooms, strict=True))
        assert not plan.uniform_query or all(end % plan.uniform_query == 0 for end in (*ends, *plan.bounds))
        if policy.cut == "equal":
            assert ends == tuple(min(end, num_tokens) for end in plan.bounds)
    if policy.cut == "equal" and plan.reason is Reason.SPLIT:
        unit = plan.uniform_query or 1
        assert rooms[:-1] == [plan.num_tokens_max // unit // policy.num_ubatches * unit] * (policy.num_ubatches - 1)
    if policy.cut == "cost" and plan.reason is Reason.SPLIT:
        heaviest = max(range(len(ranks)), key=lambda rank: table[rank][Row.COST])
        others = [rank for rank in range(len(ranks)) if table[rank][Row.COST] == table[heaviest][Row.COST]]
        assert any(list(plan.own_bounds(rank)[:-1]) == table[rank][WISHED_CUTS] for rank in others)


def sizes_of(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise((0, *ends))]


BY_COST = OverlapConfig(num_ubatches=2, force_split=True, cut="cost")


def test_the_rank_with_most_work_gets_its_cut_and_the_others_shift_inside_it() -> None:
    """Rank 0 has fewer tokens, but with long contexts; rank 1 wishes 11 + 9, but all rows are cut 7 + 13."""
    long = batch_of(*[(400, 400 - 40 * i, 1) for i in range(8)])
    short = batch_of((20, 0, 20))
    table = table_of([(long, None), (short, None), (batch_of((3, 0, 3)), None)], BY_COST)
    [wished], [other], [few] = (column[WISHED_CUTS] for column in table)
    assert table[0][Row.COST] > table[1][Row.COST]
    assert (wished, other, few) == (3, 11, 2)
    plan = decide(table, BY_COST)
    assert plan.bounds == (3 * 20 // 8, 20)
    assert plan.own_bounds(0) == (3, 8)
    assert plan.own_bounds(1) == (7, 20)
    assert plan.own_bounds(2) == (2, 3)


def test_of_ranks_with_the_same_work_not_the_first_wins_but_the_same_one() -> None:
    parts = [(400, 400, 1), (4, 4, 1), (4, 4, 1), (4, 4, 1)]
    ranks: Ranks = [(batch_of(*parts), None), (batch_of(*reversed(parts)), None), (batch_of((460, 459, 1)), None)]
    tables = [[table_of(ranks, BY_COST)[i] for i in order] for order in itertools.permutations(range(3))]
    assert len({column[Row.COST] for column in tables[0]}) == 1
    assert len({tuple(column[WISHED_CUTS]) for column in tables[0]}) > 1
    assert len({decide(table, BY_COST).bounds for table in tables}) == 1


def test_without_overlap_the_table_has_no_wishes() -> None:
    assert all(len(column) == NUM_ROWS for column in table_of([(batch_of((4, 0, 4)), None)], OverlapConfig(cut="cost")))
    assert len(table_of([(batch_of((4, 0, 4)), None)], replace(BY_COST, num_ubatches=4))[0]) == NUM_ROWS + 3
