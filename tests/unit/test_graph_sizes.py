"""Which steps run in a CUDA graph: sizes by rule or by name, and one choice for all ranks."""

from __future__ import annotations

import pytest
from batches import batch_of

from hocket.config.engine import OverlapConfig
from hocket.config.graphs import asked_sizes, captured_sizes, fitting_size
from hocket.errors import ConfigError
from hocket.overlap.vote import GraphReason, Reason, decide, facts

SIZES = (1, 2, 4, 8)
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


def column(num_decodes: int, graph_mode: int = 1, prompt: int = 0) -> list[int]:
    parts = [(4, 4, 1)] * num_decodes + ([(prompt, 0, prompt)] if prompt else [])
    return facts(batch_of(*parts), step=1, digest=2, num_unfinished=len(parts), graph_mode=graph_mode)


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
    plan = decide(table, OverlapConfig(), SIZES)
    assert (plan.graph, plan.graph_tokens) == (reason, size)
    assert decide(table[::-1], OverlapConfig(), SIZES).graph_tokens == size


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
def test_decodes_run_whole_where_there_is_a_graph(
    table: list[list[int]], policy: OverlapConfig, reason: Reason, graph: GraphReason, size: int
) -> None:
    plan = decide(table, policy, SIZES)
    assert (plan.reason, plan.graph, plan.graph_tokens) == (reason, graph, size)
    assert plan.num_ubatches == 1 + (reason is Reason.SPLIT)
    assert all(not wish for wish in plan.wishes)


def test_no_graph_without_sizes() -> None:
    assert decide([column(4), column(4)], OverlapConfig()).graph is GraphReason.DISABLED
    assert decide([column(4), column(4)], TWO).reason is Reason.SPLIT
