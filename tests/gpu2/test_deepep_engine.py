"""DeepEP's transports on two GPUs: as right as bf16 can be with overlap off and on and from graphs, with NaN in what is
not set, and a rank that is killed is named."""

from __future__ import annotations

from typing import Any

import pytest
from answers import greedy, settled_stats
from bf16_answers import Judge
from counters import assert_add_up
from gloo_groups import Groups
from gpus import missing
from nan_answers import SpoiltGroups, assert_nan_changes_nothing
from patched_ranks import patched_environment
from test_bf16 import COMMON, LENGTHS, MAX_SEQS, NUM_TOKENS
from test_graphs import assert_a_killed_rank_is_named

from hocket.moe.transport.deepep_library import unavailable_reason

DEEPEP = ("deepep_high_throughput", "deepep_low_latency")
CELLS = [
    ("deepep_high_throughput", "triton_grouped", "greenlet", 2),
    ("deepep_high_throughput", "deep_gemm", "thread", 3),
    ("deepep_high_throughput", "grouped_mm", "greenlet", 1),
    ("deepep_low_latency", "triton_grouped", "greenlet", 3),
    ("deepep_low_latency", "deep_gemm", "thread", 2),
    ("deepep_low_latency", "grouped_mm", "greenlet", 2),
    ("deepep_low_latency", "deep_gemm", "greenlet", 1),
]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Without it all of these are skipped, with the reason."""
    if reason := unavailable_reason("deepep_low_latency", "cuda"):
        missing(reason)


@pytest.mark.parametrize(("transport", "experts", "executor", "num_ubatches"), CELLS)
def test_as_right_as_bf16_can_be_step_by_step(
    groups: Groups, judge: Judge, transport: str, experts: str, executor: str, num_ubatches: int
) -> None:
    """Prefills, chunks, mixed steps and decodes, launched kernel by kernel. Each engine opens the library anew."""
    options: dict[str, Any] = {"enforce_eager": True, "all2all_backend": transport, "moe_backend": experts}
    if num_ubatches > 1:
        options |= {"ubatch_size": num_ubatches, "ubatch_executor": executor}
        options |= {"dbo_decode_token_threshold": num_ubatches, "dbo_prefill_token_threshold": num_ubatches}
    asked, ranks = judge.prompts(LENGTHS), [i % 2 for i in range(len(LENGTHS))]
    with groups.llm(judge.path, 2, **COMMON, long_prefill_token_threshold=32, **options) as llm:
        assert {rank["moe_backend"] for rank in llm.ranks} == {experts}
        params = [greedy(count, logprobs=20) for count in NUM_TOKENS]
        results = llm.generate(asked, params, use_tqdm=False, data_parallel_rank=ranks)
        if num_ubatches > 1:
            assert assert_add_up(settled_stats(llm), num_ubatches)["split"] >= max(NUM_TOKENS) / 2
    found = judge.figures(results)
    print(f"\n{transport} {experts} {executor} {num_ubatches}: {found}")
    assert found.decisive
    assert found.faults() == []


@pytest.mark.parametrize(
    ("experts", "executor", "num_ubatches"),
    [
        ("triton_grouped", "greenlet", 1),
        ("deep_gemm", "greenlet", 1),
        ("triton_grouped", "greenlet", 2),
        ("deep_gemm", "thread", 3),
    ],
)
def test_as_right_from_graphs(groups: Groups, judge: Judge, experts: str, executor: str, num_ubatches: int) -> None:
    """Whole, and with both streams of so many ubatches in one."""
    assert_right_from_graphs(groups, judge, "deepep_low_latency", experts, executor, num_ubatches)


@pytest.mark.parametrize(("executor", "num_ubatches"), [("greenlet", 1), ("thread", 2)])
def test_graphs_can_hold_high_throughput(judge: Judge, executor: str, num_ubatches: int) -> None:
    """Engines do not take it, as its class says."""
    capturing = Groups()
    try:
        with patched_environment("capturing_deepep:install"):
            assert_right_from_graphs(
                capturing, judge, "deepep_high_throughput", "triton_grouped", executor, num_ubatches
            )
    finally:
        capturing.close()


def assert_right_from_graphs(
    groups: Groups, judge: Judge, transport: str, experts: str, executor: str, num_ubatches: int
) -> None:
    """Decodes replay graphs, of ubatches where there are several, and answers are as right as bf16 can be."""
    options: dict[str, Any] = {"all2all_backend": transport, "moe_backend": experts}
    options |= {"attention_backend": "flashinfer"}
    if num_ubatches > 1:
        options |= {"ubatch_size": num_ubatches, "ubatch_executor": executor}
        options |= {"dbo_decode_token_threshold": num_ubatches, "dbo_prefill_token_threshold": num_ubatches}
    asked, ranks = judge.prompts(LENGTHS), [i % 2 for i in range(len(LENGTHS))]
    with groups.llm(judge.path, 2, **COMMON, **options) as llm:
        params = [greedy(count, logprobs=20) for count in NUM_TOKENS]
        results = llm.generate(asked, params, use_tqdm=False, data_parallel_rank=ranks)
        for rank in settled_stats(llm):
            assert rank["graphs"].get("graph", 0) >= max(NUM_TOKENS) / 2
            if num_ubatches > 1:
                assert rank["overlap"]["reasons"]["decode"]["split"] >= 8
    found = judge.figures(results)
    print(f"\ngraphs {transport} {experts} {num_ubatches}: {found}")
    assert found.decisive
    assert found.faults() == []


@pytest.mark.parametrize("transport", DEEPEP)
def test_nan_in_unset_memory_and_padding(groups: Groups, spoilt: SpoiltGroups, judge: Judge, transport: str) -> None:
    options = COMMON | {"cudagraph_capture_sizes": f"{MAX_SEQS}", "all2all_backend": transport}
    assert_nan_changes_nothing(judge, groups, spoilt, attention_backend="flashinfer", **options)


@pytest.mark.parametrize("transport", DEEPEP)
def test_a_killed_rank_is_named(judge: Judge, transport: str) -> None:
    """Although the other one's kernels would wait much longer than a step may take."""
    options = COMMON | {"all2all_backend": transport, "enforce_eager": True, "step_timeout": 10.0}
    assert_a_killed_rank_is_named(judge.path, 20.0, **options)
