"""What is timed on an engine writes to cache blocks wherever; answers to prompts that it had before stay right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphs_on_cpu
import pytest
import torch
from answers import greedy, ids_of
from checkpoints import VOCAB, make
from in_process import engine_of, in_process_llm

from hocket.channel.messages import TimeLanes, TimeReplays
from hocket.llm import LLM
from hocket.observe import Observer
from hocket.worker.capture import unlimited

BLOCK = 4
NUM_TOKENS = 6
OPTIONS: dict[str, Any] = {"enable_prefix_caching": True, "block_size": BLOCK, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("v2", tmp_path_factory.mktemp("checkpoints"))


def drawn(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]


def generate(llm: LLM, prompts: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Tokens, and how many of each prompt's were found in the cache at least."""
    results = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
    return ids_of(results), min(result.num_cached_tokens for result in results)


def measured(llm: LLM, order: Any) -> int:
    """Blocks of requests that `order` wrote something else to."""
    engine, caches = engine_of(llm), engine_of(llm).runner.kv_caches
    before = [cache.clone() for cache in caches]
    observer = Observer(engine, 0, unlimited)
    observer.answer(order)
    with torch.inference_mode():
        observer.rest()
    changed = [(cache != old).flatten(1).any(-1) for cache, old in zip(caches, before, strict=True)]
    return int(torch.stack(changed).any(0)[: engine.runner.num_blocks].sum())


@pytest.mark.parametrize(("phase", "length"), [("prefill", 16), ("decode", 2 * BLOCK + 1)])
def test_prompts_from_before_lanes_were_timed(model: Path, phase: str, length: int) -> None:
    asked = drawn(4, 5 * BLOCK, seed=1)
    with in_process_llm(model, device="cpu", kv_cache_memory_bytes=1 << 20, **OPTIONS) as llm:
        expected, _ = generate(llm, asked)
        assert generate(llm, asked) == (expected, 4 * BLOCK), "all but the last block, of which a token is computed"
        order = TimeLanes(phase=phase, num_tokens=8, length=length, repeats=1, count=1)
        assert measured(llm, order) > 0
        assert generate(llm, asked) == (expected, 0)
        assert generate(llm, asked) == (expected, 4 * BLOCK), "prefixes are kept again"


def test_prompts_from_before_a_graph_was_replayed(model: Path) -> None:
    """The replayed step is one of requests that have gone since: others' prompts lie in their blocks by now."""
    with graphs_on_cpu.in_this_process(), in_process_llm(model, cudagraph_capture_sizes="8", **OPTIONS) as llm:
        asked = drawn(6, 5 * BLOCK, seed=2)
        engine = engine_of(llm)
        expected, _ = generate(llm, asked)
        generate(llm, drawn(8, BLOCK, seed=3))
        engine.scheduler.forget_prefixes()  # as if their blocks had been needed: they are given out first from here on
        assert generate(llm, asked)[0] == expected
        assert generate(llm, asked) == (expected, 4 * BLOCK)
        assert measured(llm, TimeReplays(size=8, count=1)) > 0
        assert generate(llm, asked) == (expected, 0)
