"""Compares what ranks full of NaN say with what clean ones say (see nan_ranks.py). For tests only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from answers import greedy, ids_of
from bf16_answers import Figures, Judge
from gloo_groups import Groups
from patched_ranks import patched_environment

from hocket.dist.launcher import RankGroup
from hocket.llm import LLM
from hocket.outputs import RequestOutput

ALONE, BOTH = (1, 33, 120), (7, 20, 64, 2)
"""Lengths of the prompts that rank 0 gets while rank 1 has nothing, and of those that both get."""


class SpoiltGroups(Groups):
    """Ranks in whose memory nothing but NaN is unset."""

    def start(self, num_ranks: int) -> RankGroup:
        with patched_environment("nan_ranks:install"):
            return super().start(num_ranks)


def assert_nan_changes_nothing(judge: Judge, clean: Groups, spoilt: Groups, **options: Any) -> list[dict[str, Any]]:
    """Two ranks, the second of them without work for a while, then with less than the first. Returns the counters.

    With rank 1 idle all that rank 0 computes is the same in the same order: the same to the last bit. When both have
    work it depends on when each hears of it which step it is done in.
    """
    with clean.llm(judge.path, 2, **options) as llm:
        expected = _alone(llm, judge)
    with spoilt.llm(judge.path, 2, **options) as llm:
        assert all(rank["spoilt"]["caches"] and rank["spoilt"]["tensors"] for rank in llm.ranks)
        given = _alone(llm, judge)
        assert _said(given) == _said(expected)
        together = _together(llm, judge)
        assert all(math.isfinite(logprob) for results in (given, together) for _, logprob in _said(results))
        found = judge.figures([*given, *together])
        print(f"\n{Figures.header()}\n{found}")
        assert found.faults() == []
        return llm.stats()


def _alone(llm: LLM, judge: Judge) -> list[RequestOutput]:
    """First without log-probabilities, which lets steps be scheduled ahead; the same then again with them. (Requests
    end together: a step scheduled ahead still has a row of one that has ended.)"""
    asked = judge.prompts(ALONE)
    params = [greedy(28, logprobs=logprobs) for logprobs in (None, 5)]
    ahead, results = (llm.generate(asked, each, use_tqdm=False, data_parallel_rank=0) for each in params)
    assert ids_of(ahead) == ids_of(results)
    return results


def _together(llm: LLM, judge: Judge) -> list[RequestOutput]:
    params = [greedy(count, logprobs=5) for count in (30, 25, 20, 8)]
    return llm.generate(judge.prompts(BOTH, seed=1), params, use_tqdm=False, data_parallel_rank=[0, 0, 0, 1])


def _said(results: Sequence[RequestOutput]) -> list[tuple[int, float]]:
    """Every token with a log-probability, and that."""
    positions = [position for result in results for position in result.outputs[0].logprobs or ()]
    return [(token_id, said.logprob) for position in positions for token_id, said in position.items()]
