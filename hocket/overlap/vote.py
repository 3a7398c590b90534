"""The vote: each rank's facts about its next step, and what all ranks decide from everybody's facts.

The decision is a pure function of the whole table, so every rank comes to the same one. Knows nothing of how the
table travels (`dist/exchange.py`) or of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from hocket.config.engine import OverlapConfig
from hocket.config.graphs import GraphConfig, fitting_size, least_for_split
from hocket.errors import StepDesync
from hocket.overlap.cost import Wish
from hocket.overlap.failure import FailedStage
from hocket.overlap.slices import equal_bounds, fitted_bounds, scaled_bounds
from hocket.scheduler.batch import Batch


class Row(IntEnum):
    """Rows of the table; each rank fills one column of int32."""

    TOKENS = 0
    GRAPH_MODE = 1  # 1 if this rank's batch may run in a CUDA graph
    UNIFORM_QUERY = 2  # tokens per request if every request is a decode of this length, else 0
    MAX_QUERY = 3  # longest query; -1: no request
    MAY_SPLIT = 4  # 1, or minus a Reason: why this rank cannot
    REQUESTS = 5
    SKIP_DRAFTS = 6
    CONTEXT_TOKENS = 7
    COST = 8  # of this rank's batch, where cuts go by cost (`Wish.cost`)
    STEP = 9
    DIGEST = 10
    ABORT = 11  # 0, or where this rank's last step failed (`FailedStage.code`), and so it did for all
    UNFINISHED = 12  # requests this rank still has, also when none is in its batch
    ARRIVAL_US = -1  # last, filled by the exchange: the host's monotonic clock; for figures only, never for decisions


NUM_ROWS = len(Row)
WISHED_CUTS = slice(NUM_ROWS - 1, -1)
"""Rows before the last, one for each cut, which the table has besides where cuts go by cost (`Wish.cuts`)."""
Column = Sequence[int]
Table = Sequence[Column]
INT32_MAX = 0x7FFFFFFF
NO_GRAPHS = GraphConfig()


class _Said(IntEnum):
    """A reason with a name that counters and logs use."""

    @property
    def label(self) -> str:
        return self.name.lower()


class Reason(_Said):
    """Why a step was split or not; the same names in logs, counters and tests. Of several refusals the lowest wins.

    disabled: overlap is off. no_work: it is on, but no rank had anything to run. step_dropped: the step before had
    failed on some rank, so this one, scheduled on top of it, did not run. no_split_graph: decodes that replay a CUDA
    graph of the whole step, as there is none of its ubatches, or some rank has too few tokens to have some in each:
    replaying is faster than launching ubatches.
    """

    SPLIT = 0
    DISABLED = 1
    BELOW_THRESHOLD = 2
    PREFIX_HAZARD = 3
    RANK_CANNOT_SPLIT = 4
    NOT_PROFITABLE = 5
    NO_WORK = 6
    STEP_DROPPED = 7
    NO_SPLIT_GRAPH = 8


class GraphReason(_Said):
    """Why a step in which some rank worked ran in a CUDA graph or not. Of several the lowest that refuses is said.

    disabled: none were asked for, or nobody had anything to run. eager_forced: none were captured.
    no_graph_size: more requests than any graph holds. split: HOCKET_FORCE_SPLIT has it run in parts, and there is no
    graph of these.
    """

    GRAPH = 0
    DISABLED = 1
    NOT_UNIFORM = 2
    NO_GRAPH_SIZE = 3
    SPLIT = 4
    EAGER_FORCED = 5


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What all ranks do in this step. Token counts are per rank; `num_tokens_max` is what each counts when padded.

    bounds: where the padded tokens are cut; the last one is `num_tokens_max`, or the rows of the split graph that all
    ranks replay; one entry: the step is not split.
    uniform_query: tokens per request if every working rank is a decode of this length, else 0.
    wishes: where each rank would like its own tokens to be cut; empty ones: where the padded ones are.
    """

    step: int
    reason: Reason
    bounds: tuple[int, ...]
    wishes: tuple[tuple[int, ...], ...]
    num_tokens: tuple[int, ...]
    num_tokens_max: int
    num_requests_max: int
    graph: GraphReason
    graph_tokens: int  # of the captured graph that all ranks replay; 0: the step runs eagerly
    uniform_query: int
    skip_drafts: bool
    any_decodes: bool
    is_idle: bool  # nobody has anything to run now
    is_finished: bool  # nobody has a request left
    failed: tuple[int, FailedStage] | None  # a rank whose last step failed, and where

    @property
    def num_ubatches(self) -> int:
        return len(self.bounds)

    def own_bounds(self, rank: int) -> tuple[int, ...]:
        """Ends of the parts of this rank's own tokens, each no larger than the padded part."""
        num_tokens = self.num_tokens[rank]
        if self.wishes[rank]:
            return fitted_bounds(self.wishes[rank], num_tokens, self.bounds)
        return tuple(min(end, num_tokens) for end in self.bounds)

    def parts(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(tokens of this rank, rows that every rank counts) of each ubatch of a step that replays a graph."""
        rows = equal_bounds(self.graph_tokens, self.num_ubatches)
        own = (min(end, self.num_tokens[rank]) for end in rows)
        return tuple((b - a, d - c) for (a, b), (c, d) in zip(pairwise((0, *own)), pairwise((0, *rows)), strict=True))


def facts(
    batch: Batch,
    *,
    step: int,
    digest: int,
    num_unfinished: int,
    graph_mode: int = 0,
    refusal: Reason | None = None,
    failure: int = 0,
    wish: Wish | None = None,
) -> list[int]:
    """This rank's column for `batch`. `refusal`: why this rank cannot split, if so. `failure`: code of its last step.
    `wish`: where it would like to be cut, if cuts go by cost.

    ARRIVAL_US is filled when the column is sent.
    """
    column = [0] * NUM_ROWS
    requests = batch.requests
    column[Row.TOKENS] = batch.num_tokens
    column[Row.GRAPH_MODE] = graph_mode
    column[Row.UNIFORM_QUERY] = batch.uniform_query
    column[Row.MAX_QUERY] = max((r.num_tokens for r in requests), default=-1)
    column[Row.MAY_SPLIT] = 1 if refusal is None or not requests else -int(refusal)
    column[Row.REQUESTS] = len(requests)
    column[Row.SKIP_DRAFTS] = 1
    column[Row.CONTEXT_TOKENS] = min(sum(r.start + r.num_tokens for r in requests), INT32_MAX)
    column[Row.STEP] = step & INT32_MAX
    column[Row.DIGEST] = digest
    column[Row.ABORT] = failure
    column[Row.UNFINISHED] = num_unfinished
    if wish is not None:
        column[Row.COST] = min(wish.cost, INT32_MAX)
        column[WISHED_CUTS] = wish.cuts
    return column


def decide(table: Table, policy: OverlapConfig, graphs: GraphConfig = NO_GRAPHS) -> StepPlan:
    """The plan every rank derives from the same `table` (one column per rank).

    Raises:
        StepDesync: ranks are at different steps or run different configurations; names the odd rank out.
    """
    _check_same(table, Row.STEP, "step")
    _check_same(table, Row.DIGEST, "configuration digest")
    tokens = tuple(column[Row.TOKENS] for column in table)
    working = [column for column in table if column[Row.TOKENS] > 0]
    most = max(tokens)
    uniform = {column[Row.UNIFORM_QUERY] for column in working}
    uniform_query = uniform.pop() if len(uniform) == 1 else 0
    codes = ((rank, column[Row.ABORT]) for rank, column in enumerate(table))
    failed = next(((rank, FailedStage.from_code(code)) for rank, code in codes if code), None)
    reason = Reason.STEP_DROPPED if failed else _reason(working, uniform_query, policy)
    graph, graph_tokens = _graph(table, working, uniform_query, graphs.sizes)
    if reason is Reason.SPLIT and graph_tokens and not _has_split_graph(working, graph_tokens, policy, graphs):
        if policy.force_split:  # then ubatches are launched one by one
            graph, graph_tokens = GraphReason.SPLIT, 0
        else:
            reason = Reason.NO_SPLIT_GRAPH
    split = reason is Reason.SPLIT
    return StepPlan(
        step=table[0][Row.STEP],
        reason=reason,
        bounds=_bounds(working, most, graph_tokens, uniform_query or 1, policy) if split else (most,),
        wishes=tuple(tuple(column[WISHED_CUTS]) if split and not graph_tokens else () for column in table),
        num_tokens=tokens,
        num_tokens_max=most,
        num_requests_max=max(column[Row.REQUESTS] for column in table),
        graph=graph,
        graph_tokens=graph_tokens,
        uniform_query=uniform_query,
        skip_drafts=all(column[Row.SKIP_DRAFTS] for column in table),
        any_decodes=any(column[Row.UNIFORM_QUERY] > 0 for column in working),
        is_idle=most == 0,
        is_finished=all(column[Row.UNFINISHED] == 0 for column in table),
        failed=failed,
    )


def _reason(working: list[Column], uniform_query: int, policy: OverlapConfig) -> Reason:
    """SPLIT, or the lowest code of all refusals. Ranks without work neither veto nor count for the threshold."""
    if policy.num_ubatches < 2:
        return Reason.DISABLED
    if not working:
        return Reason.NO_WORK
    refusals = [Reason(-column[Row.MAY_SPLIT]) for column in working if column[Row.MAY_SPLIT] != 1]
    threshold = policy.decode_token_threshold if uniform_query else policy.prefill_token_threshold
    if not policy.force_split and any(column[Row.TOKENS] < threshold for column in working):
        refusals.append(Reason.BELOW_THRESHOLD)
    return min(refusals, default=Reason.SPLIT)


def _graph(table: Table, working: list[Column], uniform_query: int, sizes: Sequence[int]) -> tuple[GraphReason, int]:
    """Whether all ranks replay a graph, and which: the smallest that the rank with most tokens fits into."""
    if not sizes or not working:
        return GraphReason.DISABLED, 0
    if uniform_query != 1:
        return GraphReason.NOT_UNIFORM, 0
    size = fitting_size(sizes, max(column[Row.TOKENS] for column in working))
    if size == 0:
        return GraphReason.NO_GRAPH_SIZE, 0
    if any(column[Row.GRAPH_MODE] == 0 for column in table):
        return GraphReason.EAGER_FORCED, 0
    return GraphReason.GRAPH, size


def _has_split_graph(working: list[Column], size: int, policy: OverlapConfig, graphs: GraphConfig) -> bool:
    """Whether a step of `size` rows is captured as ubatches, and each working rank has a token for each of them."""
    fewest = min(column[Row.TOKENS] for column in working)
    return size in graphs.split_sizes and fewest >= least_for_split(size, policy.num_ubatches)


def _bounds(
    working: list[Column], num_padded: int, graph_tokens: int, unit: int, policy: OverlapConfig
) -> tuple[int, ...]:
    """Where the padded tokens are cut, in multiples of `unit`: those of a graph where it was captured.

    By cost: in the proportions that the rank with the most estimated work wishes for. In every collective all wait for
    it, so it gets its own cut exactly; the others, who have less to do, come as near to theirs as these parts allow.
    """
    if graph_tokens:
        return equal_bounds(graph_tokens, policy.num_ubatches, unit)
    if policy.cut == "equal":
        return equal_bounds(num_padded, policy.num_ubatches, unit)
    heaviest = max(working, key=lambda column: (column[Row.COST], column[Row.TOKENS], tuple(column[WISHED_CUTS])))
    return scaled_bounds(heaviest[WISHED_CUTS], heaviest[Row.TOKENS], num_padded, unit)


def _check_same(table: Table, row: Row, what: str) -> None:
    values = [column[row] for column in table]
    if len(set(values)) == 1:
        return
    common = max(values, key=values.count)
    odd = next(rank for rank, value in enumerate(values) if value != common)
    raise StepDesync(f"rank {odd} has {what} {values[odd]} where the others have {common}")
