"""Dual batch overlap on two GPUs: the answers of steps that are not split, every step split that should be, and what
goes wrong is said in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import assert_as_good, assert_right, greedy, ids_of, prompts, settled_stats
from counters import assert_add_up
from gloo_groups import Groups
from pairwise import Cell, pairwise_cover
from patched_ranks import patched_ranks
from planted_steps import PLANT_FILE
from test_gpu_engine import fp32
from test_graphs import BF16, assert_a_killed_rank_is_named

from hocket.config.options import Options
from hocket.errors import UBatchFailed
from hocket.llm import LLM

LENGTHS = (1, 2, 7, 33, 64, 120, 5, 9)
DIMENSIONS = {
    "model": ("v2", "v3", "qwen3"),
    "all2all_backend": ("torch", "allgather_reducescatter"),
    "ubatch_executor": ("greenlet", "thread"),
    "ubatch_size": (2, 3),
    "is_emulated": (False, True),
    "ubatch_cut": ("equal", "cost"),
}
CELLS = pairwise_cover(DIMENSIONS, lambda cell: True)
EMULATED = {"emulate_link_gb_per_s": 1.0, "emulate_link_latency_us": 50.0}
SLOW_START: dict[str, Any] = {"step_timeout": 60.0}
"""Kernels are compiled when they are first used."""


def thresholds(least: int) -> dict[str, int]:
    return {"dbo_decode_token_threshold": least, "dbo_prefill_token_threshold": least}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_same_answers_as_transformers(groups: Groups, checkpoints: Callable[..., Path], cell: Cell) -> None:
    """Prefills, chunks, mixed steps and decodes, from the prefix cache too, all of them launched kernel by kernel."""
    given = dict(cell)
    path = checkpoints(given.pop("model"))
    link = EMULATED if given.pop("is_emulated") else {}
    options = fp32(**given, **link, **thresholds(given["ubatch_size"]), **SLOW_START, long_prefill_token_threshold=16)
    with groups.llm(path, 2, enforce_eager=True, **options) as llm:
        for _ in range(2):
            results = llm.generate(prompts(path, LENGTHS, num_tokens=12), greedy(12, logprobs=2), use_tqdm=False)
            assert_right(path, results)
        found = assert_add_up(settled_stats(llm), given["ubatch_size"])
        assert found["split"] >= 12, found


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
@pytest.mark.parametrize("model", ["v2-heads", "qwen3-heads"])
def test_overlap_changes_no_answer_in_bf16(
    groups: Groups, checkpoints: Callable[..., Path], model: str, executor: str
) -> None:
    """With FlashInfer's plans of two ubatches at once; decodes replay graphs of ubatches, or of the whole step."""
    path = checkpoints(model)
    asked, params = prompts(path, LENGTHS, num_tokens=24), [greedy(4 + 3 * i) for i in range(len(LENGTHS))]
    found = []
    dual = {"enable_dbo": True, "ubatch_executor": executor, **thresholds(2)}
    for options in ({"enforce_eager": True}, {"enforce_eager": True, **dual}, {}, {"split_graphs": False, **dual}):
        with groups.llm(path, 2, **BF16, **options, **SLOW_START) as llm:
            found.append([llm.generate(asked, params, use_tqdm=False) for _ in range(2)][-1])
            if "enable_dbo" in options:
                reasons = assert_add_up(settled_stats(llm), 2)
                assert reasons["split"] > 0
                assert (reasons["no_split_graph"] > 0) is ("split_graphs" in options), reasons
    for others in found[1:]:
        assert_as_good(path, others, found[0])


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
def test_a_ubatch_that_fails_fails_one_step(
    checkpoints: Callable[..., Path], tmp_path: Path, transport: str, executor: str
) -> None:
    """Its rank takes part in what is left of the step, on the stream of transfers; the next step works."""
    file = tmp_path / "where"
    options = fp32(enforce_eager=True, all2all_backend=transport, ubatch_executor=executor, enable_dbo=True)
    values = {"model": str(checkpoints("v2")), "data_parallel_size": 2, "enable_expert_parallel": True}
    values |= {"skip_tokenizer_init": True, **options, **thresholds(2), **SLOW_START}
    asked = [[5 + i, 6, 7] for i in range(8)]
    with (
        patched_ranks(2, "planted_steps:install", **{PLANT_FILE: str(file)}) as group,
        LLM.from_options(Options.from_dict(values), group=group) as llm,
    ):
        expected = ids_of(llm.generate(asked, greedy(12), use_tqdm=False))
        for rank, ubatch, stage in ((0, 0, "attention"), (1, 1, "experts"), (1, 0, "router"), (0, 1, "shared")):
            file.write_text(f"{rank} {ubatch} {stage} raise")
            with pytest.raises(UBatchFailed, match=rf"failed on rank {rank}, ubatch {ubatch}, .* planted in {stage}"):
                llm.generate(asked, greedy(12), use_tqdm=False)
            assert ids_of(llm.generate(asked, greedy(12), use_tqdm=False)) == expected
        assert all(rank["overlap"]["split"] > 0 for rank in settled_stats(llm))


@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
def test_a_rank_killed_in_split_steps_is_named(checkpoints: Callable[..., Path], transport: str) -> None:
    options = fp32(enforce_eager=True, all2all_backend=transport, enable_dbo=True, **thresholds(2))
    assert_a_killed_rank_is_named(checkpoints("v2"), 20.0, **options, step_timeout=10.0)
