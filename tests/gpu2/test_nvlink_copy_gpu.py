"""`nvlink_copy` on two GPUs: as right as bf16 can be with overlap off and on, step by step and from graphs, with NaN in
what is not set, and a rank that is killed is named."""

from __future__ import annotations

from typing import Any

import pytest
from answers import greedy, settled_stats
from bf16_answers import Judge
from counters import assert_add_up
from gloo_groups import Groups
from nan_answers import SpoiltGroups, assert_nan_changes_nothing
from test_bf16 import COMMON, LENGTHS, MAX_SEQS, NUM_TOKENS
from test_graphs import assert_a_killed_rank_is_named

COPIES = {"all2all_backend": "nvlink_copy", "attention_backend": "flashinfer"}
CELLS = [
    ("triton_grouped", "greenlet", 1, False),
    ("deep_gemm", "thread", 2, False),
    ("triton_grouped", "greenlet", 3, False),
    ("deep_gemm", "greenlet", 1, True),
    ("triton_grouped", "greenlet", 2, True),
    ("deep_gemm", "thread", 3, True),
]


@pytest.mark.parametrize(("experts", "executor", "num_ubatches", "in_graphs"), CELLS)
def test_as_right_as_bf16_can_be(
    groups: Groups, judge: Judge, experts: str, executor: str, num_ubatches: int, in_graphs: bool
) -> None:
    """Prefills, chunks, mixed steps and decodes."""
    options: dict[str, Any] = {**COPIES, "moe_backend": experts, "enforce_eager": not in_graphs}
    if num_ubatches > 1:
        options |= {"ubatch_size": num_ubatches, "ubatch_executor": executor}
        options |= {"dbo_decode_token_threshold": num_ubatches, "dbo_prefill_token_threshold": num_ubatches}
    asked, ranks = judge.prompts(LENGTHS), [i % 2 for i in range(len(LENGTHS))]
    with groups.llm(judge.path, 2, **COMMON, long_prefill_token_threshold=32, **options) as llm:
        params = [greedy(count, logprobs=20) for count in NUM_TOKENS]
        results = llm.generate(asked, params, use_tqdm=False, data_parallel_rank=ranks)
        stats = settled_stats(llm)
        if num_ubatches > 1:
            assert assert_add_up(stats, num_ubatches)["split"] >= max(NUM_TOKENS) / 2
        if in_graphs:
            assert all(rank["graphs"].get("graph", 0) >= max(NUM_TOKENS) / 2 for rank in stats)
    found = judge.figures(results)
    print(f"\nnvlink_copy {experts} {executor} {num_ubatches} graphs {in_graphs}: {found}")
    assert found.decisive
    assert found.faults() == []


def test_nan_in_unset_memory_and_padding(groups: Groups, spoilt: SpoiltGroups, judge: Judge) -> None:
    options = COMMON | COPIES | {"cudagraph_capture_sizes": f"{MAX_SEQS}"}
    assert_nan_changes_nothing(judge, groups, spoilt, **options)


def test_a_killed_rank_is_named(judge: Judge) -> None:
    """Although the other one's kernels would wait for ever."""
    options = COMMON | COPIES | {"enforce_eager": True, "step_timeout": 10.0}
    assert_a_killed_rank_is_named(judge.path, 20.0, **options)
