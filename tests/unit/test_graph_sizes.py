"""Which steps run in a CUDA graph: sizes by rule or by name, and one choice for all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from batches import batch_of

from hocket.config.engine import OverlapConfig
from hocket.config.graphs import GraphConfig, asked_sizes, captured_sizes, fitting_size, least_for_split
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import ConfigError
from hocket.overlap.cost import Wish
from hocket.overlap.slices import equal_bounds
from hocket.overlap.vote import GraphReason, Reason, decide, facts

SIZES = (1, 2, 4, 8)
WHOLE = GraphConfig(sizes=SIZES)
BOTH = GraphConfig(sizes=SIZES, split_sizes=(2, 4, 8))
TWO = OverlapConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=8)
FORCED = OverlapConfig(num_ubatches=2, force_split=True)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 60, 256, 512, 1000])
def test_sizes_by_rule_waste_little(largest: int) -> None:
    sizes = captured_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    for num_tokens in range(1, largest + 1):
        size = fitting_size(sizes, num_tokens)
        assert size >= num_tokens
        assert size - num_tokens <= max(7, size // 5)
    assert fitting_size(sizes, largest + 1) == 0
    assert len(captured_sizes(512)) <= 24


def test_sizes_as_asked_for() -> None:
    assert asked_sizes("8, 1,4", 64) == (1, 4, 8)
    assert asked_sizes("8,128,256", 100) == (8, 100)  # more requests than that never run
    for wrong in ("", "0,1", "8;9", "-1"):
        with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
            asked_sizes(wrong, 64)


def column(num_decodes: int, graph_mode: int = 1, prompt: int = 0, wish: Wish | None = None) -> list[int]:
    parts = [(4, 4, 1)] * num_decodes + ([(prompt, 0, prompt)] if prompt else [])
    return facts(batch_of(*parts), step=1, digest=2, num_unfinished=len(parts), graph_mode=graph_mode, wish=wish)


@pytest.mark.parametrize(
    ("table", "reason", "size"),
    [
        ([column(3), column(5)], GraphReason.GRAPH, 8),
        ([column(3), column(0)], GraphReason.GRAPH, 4),
        ([column(1), column(1)], GraphReason.GRAPH, 1),
        ([column(3), column(9)], GraphReason.NO_GRAPH_SIZE, 0),
        ([column(3), column(2, prompt=6)], GraphReason.NOT_UNIFORM, 0),
        ([column(3), column(2, graph_mode=0)], GraphReason.EAGER_FORCED, 0),
        ([column(3), column(0, graph_mode=0)], GraphReason.EAGER_FORCED, 0),
        ([column(0), column(0)], GraphReason.DISABLED, 0),
    ],
)
def test_all_ranks_choose_one_graph(table: list[list[int]], reason: GraphReason, size: int) -> None:
    plan = decide(table, OverlapConfig(), WHOLE)
    assert (plan.graph, plan.graph_tokens) == (reason, size)
    assert decide(table[::-1], OverlapConfig(), WHOLE).graph_tokens == size


@pytest.mark.parametrize(
    ("table", "policy", "reason", "graph", "size"),
    [
        ([column(4), column(3)], TWO, Reason.NO_SPLIT_GRAPH, GraphReason.GRAPH, 4),
        ([column(4), column(0)], TWO, Reason.NO_SPLIT_GRAPH, GraphReason.GRAPH, 4),
        ([column(4), column(1)], TWO, Reason.BELOW_THRESHOLD, GraphReason.GRAPH, 4),
        ([column(4), column(9)], TWO, Reason.SPLIT, GraphReason.NO_GRAPH_SIZE, 0),
        ([column(4), column(4, graph_mode=0)], TWO, Reason.SPLIT, GraphReason.EAGER_FORCED, 0),
        ([column(4), column(4, prompt=9)], TWO, Reason.BELOW_THRESHOLD, GraphReason.NOT_UNIFORM, 0),
        ([column(4, prompt=9), column(4, prompt=9)], TWO, Reason.SPLIT, GraphReason.NOT_UNIFORM, 0),
        ([column(4), column(1)], FORCED, Reason.SPLIT, GraphReason.SPLIT, 0),
    ],
)
def test_decodes_run_whole_where_there_is_a_graph_of_the_whole_alone(
    table: list[list[int]], policy: OverlapConfig, reason: Reason, graph: GraphReason, size: int
) -> None:
    plan = decide(table, policy, WHOLE)
    assert (plan.reason, plan.graph, plan.graph_tokens) == (reason, graph, size)
    assert plan.num_ubatches == 1 + (reason is Reason.SPLIT)
    assert all(not wish for wish in plan.wishes)


THREE = OverlapConfig(num_ubatches=3, decode_token_threshold=3, prefill_token_threshold=8)
BY_COST = OverlapConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=8, cut="cost")


@pytest.mark.parametrize(
    ("counts", "policy", "reason", "graph", "bounds"),
    [
        ((4, 3), TWO, Reason.SPLIT, GraphReason.GRAPH, (2, 4)),
        ((8, 5), TWO, Reason.SPLIT, GraphReason.GRAPH, (4, 8)),
        ((7, 5), TWO, Reason.SPLIT, GraphReason.GRAPH, (4, 8)),  # rows of the graph are cut, not tokens
        ((8, 4), TWO, Reason.NO_SPLIT_GRAPH, GraphReason.GRAPH, (8,)),  # nothing left for the second ubatch
        ((8, 0), TWO, Reason.SPLIT, GraphReason.GRAPH, (4, 8)),  # an idle rank has dummies
        ((4, 1), TWO, Reason.BELOW_THRESHOLD, GraphReason.GRAPH, (4,)),
        ((1, 1), TWO, Reason.BELOW_THRESHOLD, GraphReason.GRAPH, (1,)),
        ((9, 4), TWO, Reason.SPLIT, GraphReason.NO_GRAPH_SIZE, (4, 9)),
        ((8, 6), THREE, Reason.SPLIT, GraphReason.GRAPH, (2, 4, 8)),
        ((8, 5), THREE, Reason.SPLIT, GraphReason.GRAPH, (2, 4, 8)),
        ((8, 4), THREE, Reason.NO_SPLIT_GRAPH, GraphReason.GRAPH, (8,)),
        ((8, 8), BY_COST, Reason.SPLIT, GraphReason.GRAPH, (4, 8)),  # captured at equal numbers
        ((4, 3), FORCED, Reason.SPLIT, GraphReason.GRAPH, (2, 4)),
        ((4, 2), FORCED, Reason.SPLIT, GraphReason.SPLIT, (2, 4)),
        ((1, 1), FORCED, Reason.SPLIT, GraphReason.SPLIT, (0, 1)),
    ],
)
def test_decodes_replay_ubatches_that_every_rank_can_fill(
    counts: tuple[int, int], policy: OverlapConfig, reason: Reason, graph: GraphReason, bounds: tuple[int, ...]
) -> None:
    wishes = [Wish(cost=count, cuts=(1,)) if policy.cut == "cost" and count else None for count in counts]
    table = [column(count, wish=wish) for count, wish in zip(counts, wishes, strict=True)]
    for given, order in ((table, counts), (table[::-1], counts[::-1])):
        plan = decide(given, policy, BOTH)
        assert (plan.reason, plan.graph, plan.bounds) == (reason, graph, bounds)
        assert plan.graph_tokens == (bounds[-1] if graph is GraphReason.GRAPH else 0)
        if plan.graph_tokens:
            assert not any(plan.wishes)
            for rank, count in enumerate(order):
                own, rows = zip(*plan.parts(rank), strict=True)
                assert (sum(own), sum(rows)) == (count, plan.graph_tokens)
                assert all(a <= b for a, b in zip(own, rows, strict=True))
                assert all(own) or not count or reason is not Reason.SPLIT


@pytest.mark.parametrize("num_ubatches", [2, 3, 4])
def test_the_least_that_fills_a_split_graph(num_ubatches: int) -> None:
    for size in range(num_ubatches, 100):
        bounds = (0, *equal_bounds(size, num_ubatches))
        least = least_for_split(size, num_ubatches)
        for count in range(1, size + 1):
            own = [min(end, count) - min(begin, count) for begin, end in pairwise(bounds)]
            assert all(own) == (count >= least)


def test_sizes_that_are_captured_as_ubatches(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**options: Any) -> GraphConfig:
        shared = {"device": "cuda", "data_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 40}
        return resolve(Options.from_dict(shared | options), gpus=2).graphs

    sizes = (1, 2, 4, 8, 16, 24, 32, 40)
    assert (of().sizes, of().split_sizes) == (sizes, ())
    assert of(enable_dbo=True).split_sizes == (32, 40)
    assert of(enable_dbo=True, dbo_decode_token_threshold=5).split_sizes == (8, 16, 24, 32, 40)
    assert of(ubatch_size=3, dbo_decode_token_threshold=3).split_sizes == (4, 8, 16, 24, 32, 40)
    for whole in ({"split_graphs": False}, {"enforce_eager": True}, {"device": "cpu"}):
        assert of(enable_dbo=True, **whole).split_sizes == ()
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    assert of().split_sizes == (4, 8, 16, 24, 32, 40)


def test_no_graph_without_sizes() -> None:
    assert decide([column(4), column(4)], OverlapConfig()).graph is GraphReason.DISABLED
    assert decide([column(4), column(4)], TWO).reason is Reason.SPLIT
