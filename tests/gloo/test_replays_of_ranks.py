"""Decodes of several ranks that replay graphs of ubatches: the same answers, and one decision for all ranks.

On a CPU a replay runs again what would be captured (`graphs_on_cpu.py`); all else is as on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import graphs_on_cpu
import pytest
from answers import assert_right, greedy, ids_of, prompts, settled_stats
from counters import assert_add_up
from patched_ranks import patched_ranks
from planted_captures import CAPTURE_PLANT

from hocket.config.options import Options
from hocket.errors import BatonTimeout, UBatchFailed
from hocket.llm import LLM

DUAL = {"dbo_decode_token_threshold": 3, "dbo_prefill_token_threshold": 3}
EMULATED = {"emulate_link_gb_per_s": 1.0, "emulate_link_latency_us": 50.0}
LENGTHS = (1, 2, 7, 33, 64, 12, 5, 9)


@pytest.fixture(scope="module")
def capturing() -> Iterator[Callable[..., Any]]:
    """`capturing(model, **options)`: an LLM on two running ranks that capture."""
    with graphs_on_cpu.configured(), patched_ranks(2, "graphs_on_cpu:install") as group:

        @contextmanager
        def llm(model: Path, **options: Any) -> Iterator[LLM]:
            shared = {"skip_tokenizer_init": True, "data_parallel_size": 2, "enable_expert_parallel": True}
            values = {"model": str(model), "max_num_seqs": 8, **shared, **options}
            with LLM.from_options(Options.from_dict(values), group=group) as made:
                yield made

        yield llm


@pytest.mark.parametrize(
    ("n", "executor", "link", "is_async"),
    [
        (2, "greenlet", {}, True),
        (3, "thread", {}, False),
        (2, "thread", EMULATED, True),
        (3, "greenlet", EMULATED, True),
    ],
)
def test_same_answers_as_transformers(
    capturing: Callable[..., Any], checkpoints: Callable[..., Path], n: int, executor: str, link: Any, is_async: bool
) -> None:
    """Requests of other lengths, so that steps shrink from graph to graph and a rank has fewer than the other."""
    path = checkpoints("v3")
    params = [greedy(4 + 3 * i) for i in range(len(LENGTHS))]
    options = {"ubatch_size": n, "ubatch_executor": executor, "async_scheduling": is_async, **DUAL, **link}
    with capturing(path, **options) as llm:
        assert_right(path, llm.generate(prompts(path, LENGTHS, num_tokens=26), params, use_tqdm=False))
        ranks = settled_stats(llm)
        reasons = assert_add_up(ranks, n)
        for rank in ranks:
            decodes = rank["overlap"]["reasons"]["decode"]
            assert decodes["split"] >= 6, decodes
            assert rank["graphs"]["graph"] >= decodes["split"]
        assert reasons["no_split_graph"] + reasons["below_threshold"] > 0


def test_ranks_with_less_work(capturing: Callable[..., Any], checkpoints: Callable[..., Path]) -> None:
    """An idle rank takes part with dummies; one with too few requests for each ubatch has all replay whole steps."""
    path = checkpoints("v2")
    asked, params = prompts(path, LENGTHS, num_tokens=12), greedy(12)

    def run(llm: LLM, ranks: list[int]) -> tuple[list[list[int]], dict[str, int], list[dict[str, Any]]]:
        llm.stats(reset=True)
        llm.client.add_many([(str(i), asked[i], params, rank) for i, rank in enumerate(ranks)])
        found: dict[str, list[int]] = {}
        while llm.client.has_unfinished:
            found |= {result.request_id: result.outputs[0].token_ids for result in llm.client.poll(1.0)}
        stats = settled_stats(llm)
        return [found[str(i)] for i in range(len(ranks))], assert_add_up(stats, 2), stats

    with capturing(path, enable_dbo=True, cudagraph_capture_sizes="8", **DUAL) as llm:
        expected = ids_of(llm.generate(asked, params, use_tqdm=False))
        too_few = [0] * 5 + [1] * 3
        for ranks, reason in (([0] * 5, "split"), ([0] * 4, "no_split_graph"), (too_few, "no_split_graph")):
            found, reasons, stats = run(llm, ranks)
            assert found == expected[: len(ranks)]
            assert reasons[reason] >= 10, reasons
            assert all(rank["graphs"]["graph"] >= 10 for rank in stats)
            if reason == "split":
                assert stats[1]["overlap"]["ubatch_tokens"]["0+0"] >= 10, "the idle rank's dummies"
                assert stats[0]["overlap"]["ubatch_tokens"]["4+1"] >= 10


def test_without_split_graphs_decodes_run_whole(
    capturing: Callable[..., Any], checkpoints: Callable[..., Path]
) -> None:
    path = checkpoints("v2")
    with capturing(path, enable_dbo=True, split_graphs=False, **DUAL) as llm:
        assert_right(path, llm.generate(prompts(path, LENGTHS, num_tokens=8), greedy(8), use_tqdm=False))
        for rank in settled_stats(llm):
            assert rank["overlap"]["reasons"]["decode"] == {"no_split_graph": rank["phases"]["decode"]}


def starting(model: Path, install: str, **options: Any) -> None:
    """An engine of two ranks that call `install` of graphs_on_cpu."""
    environment = {CAPTURE_PLANT: "1 1 experts 2"}
    values = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enable_dbo": True,
        "max_num_seqs": 4,
        **DUAL,
        **options,
    }
    values |= {"data_parallel_size": 2, "enable_expert_parallel": True}
    with graphs_on_cpu.configured(), patched_ranks(2, f"graphs_on_cpu:{install}", **environment) as group:
        try:
            LLM.from_options(Options.from_dict(values), group=group)
        finally:
            assert group.closed


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
def test_a_ubatch_that_fails_while_it_is_captured_ends_the_start(
    checkpoints: Callable[..., Path], executor: str
) -> None:
    """In a warm-up the other rank waits for its transfers: it is ended too."""
    expected = "rank 1: capturing the CUDA graph of 4 rows in 2 ubatches failed: ubatch 1, sparse layer 1, experts: "
    with pytest.raises(UBatchFailed, match=expected):
        starting(checkpoints("v2"), "install_with_plant", ubatch_executor=executor)


def test_ubatches_whose_capture_never_ends(checkpoints: Callable[..., Path]) -> None:
    with pytest.raises(BatonTimeout, match="capturing the CUDA graph of 4 rows in 2 ubatches took more than 5 s: "):
        starting(checkpoints("v2"), "install_slow", capture_timeout=5.0)
