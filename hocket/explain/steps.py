"""Which steps would split and which would replay a graph: the ranks' vote on tables that stand for steps of some sizes.

Knows nothing of how long a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hocket.config.engine import EngineConfig
from hocket.config.graphs import least_for_split
from hocket.config.options import MAX_TOKENS
from hocket.overlap import vote
from hocket.overlap.vote import Reason, Row, StepPlan

Splits = list[dict[str, Any]]


def splits(config: EngineConfig, phase: str, captures: bool) -> Splits:
    """Runs of step sizes, equal on all ranks, with the reason the vote gives them; it changes at thresholds, behind
    graphs, and where a step is large enough for all ubatches of one. captures: whether the configured graphs are
    captured."""
    overlap, graphs, most = config.overlap, config.graphs, _most(config, phase)
    thresholds = {overlap.decode_token_threshold, overlap.prefill_token_threshold}
    thresholds |= {size + 1 for size in graphs.sizes}
    thresholds |= {least_for_split(size, overlap.num_ubatches) for size in graphs.split_sizes}
    starts = sorted({1} | {tokens for tokens in thresholds if tokens <= most})
    found: Splits = []
    for first, last in pairwise((*starts, most + 1)):
        reason = _vote(config, phase, [first] * _num_ranks(config), captures=captures).reason.label
        if found and found[-1]["reason"] == reason:
            found[-1]["tokens"][1] = last - 1
        else:
            found.append({"tokens": [first, last - 1], "reason": reason})
    return found


def cases(config: EngineConfig, captures: bool) -> list[dict[str, Any]]:
    """Steps of some sizes, and what the vote makes of each: {phase, what, tokens by rank, reason, why, ubatches (padded
    tokens of each; empty where cuts go by cost, which sizes alone do not tell), graph, graph_tokens}. captures: whether
    the configured graphs are captured."""
    return [_case(config, captures, *step) for phase in ("decode", "prefill") for step in _looked_at(config, phase)]


def _looked_at(config: EngineConfig, phase: str) -> Iterator[tuple[str, str, list[int], Reason | None]]:
    """(phase, what it is, tokens by rank, the first rank's refusal) of steps that show what the vote goes by."""
    most, num_ranks = _most(config, phase), _num_ranks(config)
    for tokens in _sizes(config, phase):
        yield phase, "all ranks alike", [tokens] * num_ranks, None
    if num_ranks > 1:
        yield phase, "one rank idle", [*[most] * (num_ranks - 1), 0], None
        yield phase, "one rank has 1", [*[most] * (num_ranks - 1), 1], None
    if phase == "prefill" and config.cache.enable_prefix_caching and config.overlap.num_ubatches > 1:
        yield phase, "prefix of the same step", [most] * num_ranks, Reason.PREFIX_HAZARD


def _case(
    config: EngineConfig, captures: bool, phase: str, what: str, tokens: Sequence[int], refusal: Reason | None
) -> dict[str, Any]:
    plan = _vote(config, phase, tokens, refusal, captures)
    is_cut_equally = plan.reason is Reason.SPLIT and (config.overlap.cut == "equal" or plan.graph_tokens > 0)
    return {
        "phase": phase,
        "what": what,
        "tokens": list(tokens),
        "reason": plan.reason.label,
        "why": _why(config, plan),
        "ubatches": [end - begin for begin, end in pairwise((0, *plan.bounds))] if is_cut_equally else [],
        "graph": plan.graph.label,
        "graph_tokens": plan.graph_tokens,
    }


def _vote(
    config: EngineConfig,
    phase: str,
    tokens: Iterable[int],
    refusal: Reason | None = None,
    captures: bool = False,
) -> StepPlan:
    """What ranks with so many tokens decide. refusal: the first one's, if it has one."""
    table = []
    for rank, count in enumerate(tokens):
        column = [0] * vote.NUM_ROWS
        column[Row.TOKENS] = count
        column[Row.MAY_SPLIT] = 1 if refusal is None or rank else -int(refusal)
        column[Row.UNIFORM_QUERY] = int(phase == "decode" and count > 0)
        column[Row.GRAPH_MODE] = int(captures)
        if config.overlap.cut == "cost":
            column[vote.WISHED_CUTS] = [count // 2] * (config.overlap.num_ubatches - 1)  # the reason depends on none
        table.append(column)
    return vote.decide(table, config.overlap, config.graphs)


def _num_ranks(config: EngineConfig) -> int:
    return config.parallel.expert_parallel_size


def _most(config: EngineConfig, phase: str) -> int:
    """Most tokens that a rank's step of this kind has."""
    limits = config.scheduler
    return min(limits.max_num_batched_tokens, limits.max_num_seqs if phase == "decode" else MAX_TOKENS)


def _sizes(config: EngineConfig, phase: str) -> list[int]:
    """One token, both sides of the threshold where there is overlap and of the largest graph, the most there can be."""
    overlap, most = config.overlap, _most(config, phase)
    sizes = {1, most}
    if overlap.num_ubatches > 1:
        at = overlap.decode_token_threshold if phase == "decode" else overlap.prefill_token_threshold
        sizes |= {at - 1, at}
    if config.graphs.sizes and phase == "decode":
        sizes |= {config.graphs.sizes[-1], config.graphs.sizes[-1] + 1}
    return sorted(size for size in sizes if 1 <= size <= most)


def _why(config: EngineConfig, plan: StepPlan) -> str:
    overlap = config.overlap
    kind = "decode" if plan.uniform_query else "prefill"
    threshold = overlap.decode_token_threshold if plan.uniform_query else overlap.prefill_token_threshold
    fewest = min((count for count in plan.num_tokens if count), default=0)
    if plan.reason is Reason.SPLIT:
        return "every step is" if overlap.force_split else f"≥ {threshold} on each rank that works"
    if plan.reason is Reason.NO_SPLIT_GRAPH:
        return _why_whole(config, plan.graph_tokens, fewest)
    if plan.reason is Reason.BELOW_THRESHOLD:
        return f"{fewest} < {threshold}, the {kind} threshold"
    if plan.reason is Reason.PREFIX_HAZARD:
        return "read before it is written"
    return "overlap is off" if plan.reason is Reason.DISABLED else plan.reason.label


def _why_whole(config: EngineConfig, size: int, fewest: int) -> str:
    """Why a step of at least `fewest` tokens a rank replays the graph of `size` rows whole."""
    if size not in config.graphs.split_sizes:
        return "no graphs of ubatches (--no-split-graphs)"
    least = least_for_split(size, config.overlap.num_ubatches)
    return f"{fewest} < {least}: no token for each ubatch of the graph of {size}"
