"""HOCKET_FORCE_SPLIT on one, three and four ranks (two: `test_overlap`), and what is asked of prompts while split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import more_checkpoints
import pytest
from answers import greedy, prompts, reference_logprobs
from gloo_groups import Groups
from overlap_answers import Checker
from overlap_cells import FORCED_SIZES, PHASES, ranks_of

LENGTHS = (1, 3, 40, 7, 35)


@pytest.fixture(scope="module")
def checker(groups: Groups, checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(groups, more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints))


@pytest.mark.parametrize(
    ("ranks", "ubatches", "executor", "transport", "prefix"),
    [
        (1, 2, "greenlet", "local", True),
        (1, 3, "thread", "local", False),
        (1, 4, "greenlet", "local", False),
        (3, 2, "thread", "torch", True),
        (3, 4, "greenlet", "allgather_reducescatter", False),
        (4, 2, "greenlet", "allgather_reducescatter", True),
        (4, 3, "thread", "torch", False),
    ],
)
def test_same_answers(checker: Checker, ranks: int, ubatches: int, executor: str, transport: str, prefix: bool) -> None:
    """Also with fewer tokens than ubatches, and on ranks without work."""
    config = {
        "checkpoint": "v3",
        "ranks": ranks,
        "transport": transport,
        "executor": executor,
        "ubatches": ubatches,
        "prefix": prefix,
        "chunk": 16,
        "threshold": "forced",
    }
    sizes = [size for size in FORCED_SIZES if len(size) == ranks_of(config)]
    assert sizes
    checker.check(config, [(size, phase) for size in sizes for phase in PHASES])


@pytest.mark.parametrize(("ranks", "ubatches", "executor"), [(1, 3, "greenlet"), (2, 2, "thread"), (3, 4, "greenlet")])
def test_log_probabilities_of_prompts(
    groups: Groups,
    checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    ubatches: int,
    executor: str,
) -> None:
    """Those of every prompt token are transformers', wherever prompts are cut by chunks and by ubatches."""
    path = checkpoints("v3")
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", str(ubatches))
    options = {"block_size": 4, "long_prefill_token_threshold": 11, "max_model_len": 64, "ubatch_executor": executor}
    with groups.llm(path, ranks, **options) as llm:
        results = llm.generate(prompts(path, LENGTHS), greedy(1, prompt_logprobs=1))
        stats = llm.stats()
    for result in results:
        ids, found = result.prompt_token_ids, result.prompt_logprobs
        assert found is not None
        assert len(found) == len(ids)
        assert found[0] is None
        expected = reference_logprobs(path, tuple(ids))
        for position, row in enumerate(found[1:], start=1):
            assert row is not None
            theirs = float(expected[position - 1, ids[position]])
            assert row[ids[position]].logprob == pytest.approx(theirs, abs=1e-5)
    for rank in stats:
        idle = sum(rank["overlap"]["reasons"].get("idle", {}).values())
        assert rank["overlap"]["split"] >= rank["steps"] - idle > 0
        assert all(len(key.split("+")) == ubatches for key in rank["overlap"]["ubatch_tokens"])
