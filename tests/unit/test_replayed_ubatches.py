"""Decodes that replay graphs of ubatches give what eager steps give: one rank, and a replay runs what was captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphs_on_cpu
import planted_captures
import pytest
import torch
from answers import assert_right, greedy, prompts
from checkpoints import make
from counters import assert_add_up
from in_process import engine_of, in_process_llm

from hocket.cache.storage import block_of, num_blocks_of
from hocket.errors import CapacityError, HocketError, UBatchFailed
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.worker.inputs import HostInputs

LENGTHS = (1, 2, 7, 33, 64, 12, 5, 9)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda name: make(name, root)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """One rank has nobody to overlap with: steps are split by force."""
    with graphs_on_cpu.in_this_process():
        yield lambda n: monkeypatch.setenv("HOCKET_FORCE_SPLIT", str(n))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("model", "n", "is_async"), [("v2", 2, False), ("v3", 3, True), ("qwen3", 2, True), ("v2", 4, True)]
)
def test_answers_of_replayed_ubatches(
    path: Callable[[str], Path], forced: Callable[[int], None], model: str, n: int, is_async: bool, executor: str
) -> None:
    forced(n)
    checkpoint = path(model)
    options: dict[str, Any] = {"ubatch_executor": executor, "async_scheduling": is_async, "max_num_seqs": 8}
    with in_process_llm(checkpoint, **options) as llm:
        params = [greedy(4 + 3 * i) for i in range(len(LENGTHS))]
        assert_right(checkpoint, llm.generate(prompts(checkpoint, LENGTHS, num_tokens=26), params, use_tqdm=False))
        [rank] = llm.stats()
        reasons = assert_add_up([rank], n)
        assert reasons["split"] > 20
        assert rank["graphs"]["graph"] >= 9, rank["graphs"]
        assert rank["graphs"]["split"] > 0, "of fewer requests than ubatches there is no graph"
        assert engine_of(llm).runner.info()["graphs"]["split_sizes"] == [size for size in (1, 2, 4, 8) if size >= n]


def test_starting_writes_to_no_block_of_requests(path: Callable[[str], Path], forced: Callable[[int], None]) -> None:
    forced(2)
    for model in ("v2", "qwen3"):
        with in_process_llm(path(model), max_num_seqs=4) as llm:
            runner = engine_of(llm).runner
            for cache in runner.kv_caches:
                assert num_blocks_of(cache) == runner.num_blocks + 1
                assert not any(block_of(cache, block).any() for block in range(runner.num_blocks))
                assert block_of(cache, runner.num_blocks).any(), "padding is written somewhere"


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("ubatch", "stage", "run", "said"),
    [
        (0, "attention", 1, "qkv projection"),
        (1, "router", 3, "attention or router"),
        (1, "experts", 2, "experts"),
        (0, "shared", 3, "shared experts"),
    ],
)
def test_a_ubatch_that_fails_while_it_is_captured(
    path: Callable[[str], Path],
    forced: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    ubatch: int,
    stage: str,
    run: int,
    said: str,
) -> None:
    """One line with size, ubatch, layer and stage, and no thread is left."""
    forced(2)
    monkeypatch.setenv(planted_captures.CAPTURE_PLANT, f"0 {ubatch} {stage} {run}")
    monkeypatch.setattr(UBatchExecutor, "run_captured", planted_captures.planted(UBatchExecutor.run_captured))
    before = set(threading.enumerate())
    with pytest.raises(UBatchFailed) as caught, in_process_llm(path("v2"), ubatch_executor=executor, max_num_seqs=4):
        pass
    assert str(caught.value) == (
        f"rank 0: capturing the CUDA graph of 4 rows in 2 ubatches failed: ubatch {ubatch}, sparse layer 1, {said}: "
        f"ValueError: planted in {stage}"
    )
    assert set(threading.enumerate()) <= before


def test_memory_that_does_not_suffice_for_a_split_graph(
    path: Callable[[str], Path], forced: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(2)

    def fails(*args: Any) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as error:
            raise UBatchFailed("ubatch 0, sparse layer 3, experts: OutOfMemoryError") from error

    monkeypatch.setattr(UBatchExecutor, "run_captured", fails)
    with (
        pytest.raises(CapacityError, match=r"of 4 rows in 2 ubatches takes more memory .* --no-split-graphs"),
        in_process_llm(path("v2"), max_num_seqs=4),
    ):
        pass


def test_what_is_asked_for_and_was_not_captured(path: Callable[[str], Path], forced: Callable[[int], None]) -> None:
    forced(2)
    with (
        in_process_llm(path("v2"), max_num_seqs=2) as llm,
        pytest.raises(HocketError, match="of 2 rows in 3 ubatches, only of 1 rows in 1, 2 rows in 1, 2 rows in 2"),
    ):
        engine_of(llm).runner.graphs[2, 3]


def test_replays_are_timed_with_the_most_requests_there_were(
    path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run few requests are left, and their steps replay the same graph."""
    checkpoint = path("v2")
    filled: list[int] = []
    with (
        graphs_on_cpu.in_this_process(),
        in_process_llm(checkpoint, max_num_seqs=8, cudagraph_capture_sizes="8") as llm,
        torch.inference_mode(),
    ):
        graph = engine_of(llm).runner.graphs[8, 1]
        fill = graph.inputs.fill

        def noted(host: HostInputs) -> None:
            filled.append(host.num_tokens)
            fill(host)

        for most in (8, 3):
            params = [greedy(4 + 3 * i) for i in range(most)]
            llm.generate(prompts(checkpoint, LENGTHS[:most], num_tokens=26), params, use_tqdm=False)
            with monkeypatch.context() as patched:
                patched.setattr(graph.inputs, "fill", noted)
                assert graph.replay_us(1) > 0
    assert filled == [8, 3]
