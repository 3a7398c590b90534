"""The step that a GPU's memory is measured with: as many tokens as allowed, in prompts with blocks of their own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from in_process import engine_of, in_process_llm

from hocket.config.engine import EngineConfig
from hocket.config.graphs import GraphConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.llm import LLM
from hocket.worker import profile
from hocket.worker.inputs import build_inputs
from hocket.worker.profile import Profile, batch_of, profiled, split_steps
from hocket.worker.split_worth import Compared, say_launched


@pytest.mark.parametrize(
    ("max_len", "tokens", "lens"), [(100, 350, [100, 100, 100, 50]), (64, 128, [64, 64]), (900, 20, [20])]
)
def test_the_largest_batch(max_len: int, tokens: int, lens: list[int]) -> None:
    given = {"max_model_len": max_len, "max_num_batched_tokens": tokens, "max_num_seqs": 4, "block_size": 16}
    config = resolve(Options.from_dict(given | {"device": "cpu"}))
    batch = batch_of(config, "prefill", tokens)
    assert [row.num_tokens for row in batch.requests] == lens
    assert (batch.num_tokens, batch.phase) == (tokens, "prefill")
    inputs = build_inputs(batch, batch.num_tokens, 16, torch.device("cpu"))
    assert inputs.token_ids.tolist() == list(range(tokens))
    assert inputs.layout.num_padded_max == tokens
    slots = inputs.attention.slot_mapping.tolist()
    assert len(set(slots)) == tokens
    assert max(slots) < 16 * sum(len(row.block_ids) for row in batch.requests)


DBO = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 32, "max_num_seqs": 12}
LIMITS = {"max_num_batched_tokens": 2000, "max_num_seqs": 100, "dbo_prefill_token_threshold": 2001}


def config_of(**options: object) -> EngineConfig:
    return resolve(Options.from_dict({"device": "cpu", **LIMITS, **options}))


def test_prefills_that_are_split_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each size that may take other kernels one, and none where no step is split."""

    def sizes(**options: object) -> list[int]:
        steps = split_steps(config_of(dbo_decode_token_threshold=101, **options), GraphConfig())
        return [size for phase, size in steps if phase == "prefill"]

    assert sizes() == []
    assert sizes(**DBO) == []
    assert sizes(**DBO, dbo_prefill_token_threshold=512) == [2000, 1000]
    assert sizes(**DBO, dbo_prefill_token_threshold=125) == [2000, 1000, 500, 250, 125]
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    assert sizes(max_num_batched_tokens=8, max_num_seqs=8) == [8, 4]


def test_decodes_that_are_split_and_replay_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(graphs: GraphConfig, **options: object) -> list[int]:
        steps = split_steps(config_of(**options), graphs)
        return [size for phase, size in steps if phase == "decode"]

    few, some_split = GraphConfig(sizes=(8, 30)), GraphConfig(sizes=(8, 30, 60), split_sizes=(60,))
    assert sizes(GraphConfig()) == []
    assert sizes(GraphConfig(), **DBO) == [100, 50]
    assert sizes(GraphConfig(), **DBO, dbo_decode_token_threshold=7) == [100, 50, 25, 12]
    assert sizes(few, **DBO, dbo_decode_token_threshold=7) == [100, 50]
    assert sizes(some_split, **DBO, dbo_decode_token_threshold=7) == [100]
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    assert sizes(some_split) == [100, 25, 12, 6, 3], "every step is, if need be without a graph"


@pytest.fixture
def cpu_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU is told of: 50 bytes before each step, and 100, 200, 300 … at most while one ran."""
    peaks = itertools.count(100, 100)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))


def profile_of(
    llm: LLM, **overlap: Any
) -> tuple[Profile, list[tuple[str, list[int]]], list[str], list[tuple[int, int]]]:
    """With what ran in ubatches (phase, tokens of each), what was limited, and what was said of progress."""
    ran: list[tuple[str, list[int]]] = []
    limited: list[str] = []
    progress: list[tuple[int, int]] = []
    runner = engine_of(llm).runner
    run = runner.executor.run

    def noted(parts: Any, caches: Any, phase: str) -> list[torch.Tensor]:
        ran.append((phase, [part.layout.num_tokens for part in parts]))
        return run(parts, caches, phase)

    def limit(what: str) -> Any:
        limited.append(what)
        return nullcontext()

    config = replace(runner.config, overlap=replace(runner.config.overlap, **overlap))
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.setattr(runner.executor, "run", noted)
        found = profiled(
            runner.model,
            runner.executor,
            config,
            GraphConfig(),
            runner.mesh.device,
            limit,
            lambda *at: progress.append(at),
        )
    return found, ran, limited, progress


def test_each_of_them_runs(monkeypatch: pytest.MonkeyPatch, cpu_for_gpu: None) -> None:
    """In ubatches, over a cache that has room for the largest prefill alone, each within a limit that names it."""
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    with in_process_llm("tiny", device="cpu", **SMALL) as llm:
        found, ran, limited, progress = profile_of(llm)
    prefills = [("prefill", [n // 2, n // 2]) for n in (32, 16, 8, 4, 2)]
    assert ran == [*prefills, ("decode", [6, 6]), ("decode", [3, 3]), ("decode", [1, 2])]
    assert limited[-1] == "compiling what a decode of 3 tokens in 2 ubatches runs"
    assert (len(limited), progress) == (8, [(done, 8) for done in range(8)])
    assert found == Profile(850, {}), "the most of all that ran; forced steps are not compared"


def test_whole_and_as_ubatches_in_turn(
    monkeypatch: pytest.MonkeyPatch, cpu_for_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Where splitting loses a line says so, with the threshold from which it would not."""
    times = {("prefill", 32): (9e3, 7e3), ("prefill", 16): (5e3, 6e3), ("decode", 12): (1e3, 1.2e3)}
    timed: list[int] = []

    def device_us(work: Callable[[], list[torch.Tensor]], count: int) -> float:
        parts = [len(part) for part in work()]
        timed.append(len(parts))
        total = sum(parts)
        return times["decode" if total == 12 else "prefill", total][len(parts) - 1] * count

    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    monkeypatch.setattr(profile, "device_us", device_us)
    with in_process_llm("tiny", device="cpu", **SMALL) as llm:
        overlap = {"force_split": False, "prefill_token_threshold": 16, "decode_token_threshold": 8}
        found, _, limited, _ = profile_of(llm, **overlap)
        config = engine_of(llm).runner.config
    assert timed == [1, 2] * 9, "three rounds of each step"
    assert found.compared == {
        "prefill": [Compared(16, 5e3, 6e3), Compared(32, 9e3, 7e3)],
        "decode": [Compared(12, 1e3, 1.2e3)],
    }
    assert limited[1] == "timing a prefill of 32 tokens in 2 ubatches and whole"
    caplog.set_level(logging.INFO, "hocket")
    say_launched(found.compared, config)
    costs = "splitting costs time here: "
    assert [record.getMessage() for record in caplog.records] == [
        f"{costs}prefills launched whole and in 2 ubatches take 16 tokens 5.00 and 6.00 ms, 32 tokens 9.00 and 7.00 ms"
        "; --dbo-prefill-token-threshold 17 splits them from 32 tokens on",
        f"{costs}decodes launched whole and in 2 ubatches take 12 tokens 1.00 and 1.20 ms; contexts of 1,024 tokens; "
        "--dbo-decode-token-threshold 13 leaves them whole",
    ]
