"""The vote: a pure function of the table, the same on all ranks; disagreement is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.config.engine import OverlapConfig
from hocket.errors import StepDesync
from hocket.overlap.vote import NUM_ROWS, Reason, Row, StepPlan, facts
from hocket.overlap.vote import decide as decide_with
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, BatchBuilder

OFF = OverlapConfig()
TWO = OverlapConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=8)


def decide(table: list[list[int]], policy: OverlapConfig = OFF) -> StepPlan:
    return decide_with(table, policy)


def batch_of(*parts: tuple[int, int, int]) -> Batch:
    """Requests as (prompt tokens, computed tokens, tokens of this step)."""
    builder = BatchBuilder(10_000)
    for i, (prompt, computed, num_tokens) in enumerate(parts):
        request = Request(
            EngineRequest(request_id=str(i), prompt_token_ids=[1] * prompt, params=SamplingParams(), max_tokens=4)
        )
        request.token_ids += [1] * max(0, computed + num_tokens - prompt)
        request.num_computed_tokens = computed
        builder.add(request, num_tokens, is_prefill=computed < prompt)
    return builder.build()


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


def test_an_idle_rank_never_vetoes() -> None:
    column = column_of()
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
