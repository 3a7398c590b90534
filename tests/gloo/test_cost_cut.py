"""Steps cut by estimated cost: the same answers, and each step is cut where trying all cuts says it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from answers import assert_right, greedy, prompts, settled_stats
from gloo_groups import Groups

from hocket.config.model import ModelConfig
from hocket.overlap.cost import TokenCost

NUM_TOKENS = 5
BUDGET = 256
CASES: dict[str, tuple[list[int], list[int]]] = {
    "prefill, unequal": ([120], [90]),
    "decode, unequal contexts": ([120, 120, 2, 3, 2, 3], [9, 9, 9]),
    "mixed, decodes and the rest of a prompt": ([4, 300, 5], [100, 90, 90]),
    "decode, fewer tokens and more to do": ([125, 125, 3], [3, 3, 3, 3]),
    "prefill, one rank alone": ([], [90, 30]),
}
"""Phase, and lengths of the prompts of each rank, all there from the first step on."""
Rows = list[tuple[int, int]]
"""A rank's part of a step: of each request the tokens computed before, and those of the step."""


def steps_of(lengths: tuple[list[int], ...]) -> list[list[Rows]]:
    """What each rank computes in each step: decodes first, then prompts, in order, as far as the budget reaches."""
    computed = [[0] * len(of_rank) for of_rank in lengths]
    steps: list[list[Rows]] = []
    while True:
        step: list[Rows] = []
        for total, done in zip(lengths, computed, strict=True):
            left, rows = BUDGET, []
            order = [i for i in range(len(total)) if done[i] >= total[i]] + [
                i for i in range(len(total)) if done[i] < total[i]
            ]
            for i in order:
                wanted = total[i] - done[i] if done[i] < total[i] else int(done[i] < total[i] + NUM_TOKENS - 1)
                if count := min(wanted, left):
                    rows.append((done[i], count))
                    done[i] += count
                    left -= count
            step.append(rows)
        if not any(step):
            return steps
        steps.append(step)


def ends_by_trying(step: list[Rows], n: int, cost: TokenCost) -> list[list[int]]:
    """Ends of each rank's parts: as near to equal cost as the parts of the costliest rank leave room."""
    wishes, totals = [], []
    for rows in step:
        context = [(p + 1, cost.decode_context if count == 1 else cost.prefill_context) for start, count in rows
                   for p in range(start, start + count)]  # fmt: skip
        sums = [0, *accumulate(cost.linear + seen * each for seen, each in context)]
        last = len(sums) - 1
        wish = [min(range(last + 1), key=lambda t: (abs(n * sums[t] - i * sums[-1]), t)) for i in range(1, n)]
        wishes.append([max(0, min(max(cut, i), last - n + i)) for i, cut in enumerate(wish, start=1)])
        totals.append((-(-sums[-1] // cost.linear), last))
    most, (_, own) = max(last for _, last in totals), max(totals)
    bounds = [*(cut * most // own for cut in wishes[totals.index(max(totals))]), most]
    found = []
    for wish, (_, last) in zip(wishes, totals, strict=True):
        ends = [0]
        for i, cut in enumerate(wish):
            room, after = bounds[i] - (0, *bounds)[i], most - bounds[i]
            possible = [e for e in range(ends[-1], min(ends[-1] + room, last) + 1) if last - e <= after]
            ends.append(min(possible, key=lambda e: abs(e - cut)))
        found.append([*ends[1:], last])
    return found


def equal_ends(step: list[Rows], n: int, cost: TokenCost) -> list[list[int]]:
    totals = [sum(count for _, count in rows) for rows in step]
    bounds = [*(max(totals) // n * i for i in range(1, n)), max(totals)]
    return [[min(end, total) for end in bounds] for total in totals]


def ubatch_tokens(
    steps: list[list[Rows]], n: int, cost: TokenCost, cut: Callable[..., list[list[int]]]
) -> list[Counter[str]]:
    """By rank, how often which sizes of its ubatches are to be seen: wherever each working rank has `n` tokens."""
    counts: list[Counter[str]] = [Counter() for _ in steps[0]]
    for step in steps:
        if min(sum(count for _, count in rows) for rows in step if rows) >= n:
            for rank, ends in enumerate(cut(step, n, cost)):
                counts[rank]["+".join(str(end - begin) for begin, end in pairwise((0, *ends)))] += 1
    return counts


@pytest.mark.parametrize(
    ("model", "transport", "n"),
    [
        ("qwen3", "torch", 2),
        ("v3", "allgather_reducescatter", 2),
        ("v3", "torch", 3),
        ("qwen3", "allgather_reducescatter", 3),
    ],
)
def test_cut_by_cost(groups: Groups, checkpoints: Callable[..., Path], model: str, transport: str, n: int) -> None:
    path = checkpoints(model)
    cost = TokenCost.of(ModelConfig.from_pretrained(path))
    options = {
        "all2all_backend": transport,
        "ubatch_size": n,
        "ubatch_cut": "cost",
        "dbo_decode_token_threshold": n,
        "dbo_prefill_token_threshold": n,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 64,
        "block_size": 4,
        "enable_prefix_caching": False,
    }
    with groups.llm(path, 2, **options) as llm:
        for name, lengths in CASES.items():
            settled_stats(llm, reset=True)
            asked = prompts(path, [length for of_rank in lengths for length in of_rank], NUM_TOKENS)
            ranks = [rank for rank, of_rank in enumerate(lengths) for _ in of_rank]
            assert_right(path, llm.generate(asked, greedy(NUM_TOKENS, logprobs=2), data_parallel_rank=ranks), 1e-5)
            steps = steps_of(lengths)
            expected = ubatch_tokens(steps, n, cost, ends_by_trying)
            stats = settled_stats(llm)
            assert [rank["overlap"]["ubatch_tokens"] for rank in stats] == expected, name
            assert expected != ubatch_tokens(steps, n, cost, equal_ends), f"{name} would pass with the equal cut"
            phase = name.partition(",")[0]
            assert all(rank["overlap"]["reasons"][phase]["split"] for rank in stats if rank["generated_tokens"]), name
            assert [rank["failed"] for rank in stats] == [0, 0]


@pytest.mark.parametrize(("ranks", "together"), [(1, True), (2, False), (3, True)])
def test_forced_on_one_rank_on_replicas_and_on_three(
    groups: Groups, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, ranks: int, together: bool
) -> None:
    """A replica's table has its own column alone, whatever its rank; also fewer tokens than ubatches are cut."""
    path = checkpoints("v3")
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "4")
    options = {"ubatch_cut": "cost", "enable_expert_parallel": together, "block_size": 4}
    with groups.llm(path, ranks, **options) as llm:
        assert_right(path, llm.generate(prompts(path, [1, 40, 3, 17, 90], 6), greedy(6, logprobs=2)), 1e-5)
        for rank in settled_stats(llm):
            busy = rank["steps"] - sum(rank["overlap"]["reasons"].get("idle", {}).values())
            assert rank["overlap"]["split"] >= busy > 0
