"""Placement of experts on ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.config.backends import PLACEMENTS
from hocket.errors import ConfigError
from hocket.moe.placement import ExpertPlacement

placements = st.builds(ExpertPlacement, st.integers(1, 300), st.integers(1, 70), st.sampled_from(PLACEMENTS))


@given(placements)
def test_every_expert_is_on_one_rank_and_found_there(placement: ExpertPlacement) -> None:
    by_rank = [placement.experts_of(rank) for rank in range(placement.num_ranks)]
    assert sorted(e for experts in by_rank for e in experts) == list(range(placement.num_experts))
    for expert, (rank, index) in enumerate(zip(placement.rank_of, placement.local_idx, strict=True)):
        assert by_rank[rank][index] == expert
    for rank, experts in enumerate(by_rank):
        table = placement.local_id_of(rank)
        assert [table[expert] for expert in experts] == list(range(len(experts)))
        assert len(table) == placement.num_experts + 1
        assert table.count(-1) == len(table) - len(experts)
        assert table[-1] == -1


@given(placements)
def test_ranks_differ_by_one_expert_and_the_first_hold_more(placement: ExpertPlacement) -> None:
    counts = [len(placement.experts_of(rank)) for rank in range(placement.num_ranks)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1
    assert all(list(e) == sorted(e) for e in map(placement.experts_of, range(placement.num_ranks)))


def test_strategies() -> None:
    assert [ExpertPlacement(7, 3).experts_of(r) for r in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [ExpertPlacement(7, 3, "round_robin").experts_of(r) for r in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    assert [ExpertPlacement(2, 3).experts_of(r) for r in range(3)] == [(0,), (1,), ()]
    assert ExpertPlacement(3, 1).local_idx == (0, 1, 2)


@pytest.mark.parametrize(("args", "field"), [((0, 1), "num_experts"), ((1, 0), "num_ranks")])
def test_counts_below_one(args: tuple[int, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ExpertPlacement(*args)
    assert caught.value.field == field


def test_unknown_strategy() -> None:
    with pytest.raises(ConfigError, match="linear, round_robin"):
        ExpertPlacement(4, 2, "random")
