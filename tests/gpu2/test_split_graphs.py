"""Decodes that replay graphs of ubatches on two GPUs: the answers of whole graphs and of eager steps, one decision for
all ranks, and what goes wrong while they are captured is said in time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import assert_as_good, greedy, prompts, settled_stats
from counters import assert_add_up
from gloo_groups import Groups
from patched_ranks import patched_environment, patched_ranks
from planted_captures import CAPTURE_PLANT
from test_graphs import BF16, LENGTHS, assert_a_killed_rank_is_named
from test_overlap_gpu import EMULATED, SLOW_START, thresholds

from hocket.config.options import Options
from hocket.errors import HocketError, UBatchFailed
from hocket.llm import LLM
from hocket.outputs import RequestOutput

TWO_RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True, "skip_tokenizer_init": True}


@pytest.mark.parametrize(
    ("model", "n", "executor", "link"),
    [
        ("v2-heads", 2, "greenlet", {}),
        ("v3-heads", 3, "thread", {}),
        ("qwen3-heads", 2, "thread", EMULATED),
        ("v2-heads", 3, "greenlet", EMULATED),
    ],
)
def test_same_answers_whole_split_and_eager(
    groups: Groups, checkpoints: Callable[..., Path], model: str, n: int, executor: str, link: dict[str, float]
) -> None:
    """Requests of other lengths, so that steps shrink from graph to graph and a rank has fewer than the other."""
    path = checkpoints(model)
    asked, params = prompts(path, LENGTHS, num_tokens=24), [greedy(4 + 3 * i) for i in range(len(LENGTHS))]
    split = {"ubatch_size": n, "ubatch_executor": executor, **thresholds(n), **link}
    found = []
    for options in ({"enforce_eager": True}, {}, split, split | {"async_scheduling": False}):
        with groups.llm(path, 2, **BF16, **options, **SLOW_START, max_num_seqs=8) as llm:
            found.append([llm.generate(asked, params, use_tqdm=False) for _ in range(2)][-1])
            if "ubatch_size" in options:
                ranks = settled_stats(llm)
                assert_add_up(ranks, n)
                for rank in ranks:
                    decodes = rank["overlap"]["reasons"]["decode"]["split"]
                    assert rank["graphs"]["graph"] >= decodes >= 8, rank["overlap"]["reasons"]
    for others in found[1:]:
        assert_as_good(path, others, found[0])


def test_ranks_with_less_work(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    """An idle rank takes part with dummies; one with too few requests for each ubatch has all replay whole steps."""
    path = checkpoints("v2-heads")
    asked, params = prompts(path, LENGTHS, num_tokens=24), greedy(24)
    options = {"enable_dbo": True, "cudagraph_capture_sizes": "8", **thresholds(3)}
    with groups.llm(path, 2, **BF16, **options, **SLOW_START) as llm:
        expected = llm.generate(asked, params, use_tqdm=False)
        for ranks, reason in (([0] * 5, "split"), ([0] * 4, "no_split_graph"), ([0] * 5 + [1] * 3, "no_split_graph")):
            llm.stats(reset=True)
            llm.client.add_many([(str(i), asked[i], params, rank) for i, rank in enumerate(ranks)])
            found: dict[str, RequestOutput] = {}
            while llm.client.has_unfinished:
                found |= {result.request_id: result for result in llm.client.poll(1.0)}
            stats = settled_stats(llm)
            assert assert_add_up(stats, 2)[reason] >= 20
            assert all(rank["graphs"]["graph"] >= 20 for rank in stats)
            assert_as_good(path, list(found.values()), expected)


def start(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), **TWO_RANKS, **BF16, "enable_dbo": True, **thresholds(2), **options}


@pytest.mark.parametrize(("executor", "run"), [("greenlet", 3), ("thread", 3), ("greenlet", 1)])
def test_a_ubatch_that_fails_while_it_is_captured_ends_the_start(
    checkpoints: Callable[..., Path], executor: str, run: int
) -> None:
    """One line with rank, size, ubatch, layer and stage; no process is left, and so no kernel that waits."""
    values = start(checkpoints("v2-heads"), ubatch_executor=executor, cudagraph_capture_sizes="4")
    expected = "rank 1: capturing the CUDA graph of 4 rows in 2 ubatches failed: ubatch 1, sparse layer 1, experts: "
    with patched_ranks(2, "planted_captures:install", **{CAPTURE_PLANT: f"1 1 experts {run}"}) as group:
        began = time.monotonic()
        with pytest.raises(UBatchFailed, match=expected):
            LLM.from_options(Options.from_dict(values), group=group)
        assert group.closed
        assert time.monotonic() - began < 120
    assert_gpus_are_idle()


def assert_gpus_are_idle() -> None:
    """No kernel spins on any of them."""
    asked = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + 20.0
    while busy := sum(map(int, subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split())):
        assert time.monotonic() < deadline, f"{busy} % are busy"
        time.sleep(0.5)


def test_capturing_ubatches_that_takes_too_long_ends_with_its_name(checkpoints: Callable[..., Path]) -> None:
    values = start(checkpoints("v2-heads"), capture_timeout=10.0, cudagraph_capture_sizes="4")
    values["dbo_prefill_token_threshold"] = 4096  # no prefill is split, and none is compiled within the limit
    with (
        patched_environment("slow_capture:install_for_two"),
        pytest.raises(HocketError, match="capturing the CUDA graph of 4 rows in 2 ubatches took more than 10 s"),
    ):
        LLM.from_options(Options.from_dict(values))


def test_a_rank_killed_while_ubatches_are_replayed_is_named(checkpoints: Callable[..., Path]) -> None:
    options = {**BF16, "enable_dbo": True, **thresholds(2)}
    assert_a_killed_rank_is_named(checkpoints("v2-heads"), 20.0, **options, step_timeout=10.0)
