"""What a rank has built before it serves is no work for its garbage collector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from patched_ranks import patched_environment

from hocket.llm import LLM
from hocket.request import SamplingParams

Checkpoints = Callable[..., Path]


def test_ranks_step_with_their_heap_left_out_of_collections(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with (
        patched_environment("frozen_heap:install", FROZEN_FOLDER=str(tmp_path)),
        LLM(str(checkpoints("v2")), skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20) as llm,
    ):
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2))
        pids = [str(pid) for pid in llm.client.group.pids.values()]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pids)
    for path in tmp_path.iterdir():
        assert int(path.read_text()) > 50_000, "torch alone makes more"
