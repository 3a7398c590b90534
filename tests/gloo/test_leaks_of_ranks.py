"""Groups of ranks and engines on them that come and go leave nothing in the front and in the ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo_groups import Groups
from processes import held, resident_bytes

from hocket.llm import LLM
from hocket.request import SamplingParams

Checkpoints = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7] for i in range(8)]
OVERLAP = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
CYCLES, WARM_UP = 20, 6
MAX_GROWTH_BYTES = 1 << 20
"""Of resident memory per cycle after the warm-up: an engine's weights and cache are over ten times that."""


def split_once(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert all(rank["overlap"]["split"] > 0 for rank in llm.stats())


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
def test_engines_on_the_same_ranks(groups: Groups, checkpoints: Checkpoints, executor: str) -> None:
    options: dict[str, Any] = OVERLAP | {"ubatch_executor": executor, "kv_cache_memory_bytes": 16 << 20}
    before: dict[int, tuple[tuple[int, int], int]] = {}
    pids: list[int] = []
    for cycle in range(CYCLES):
        with groups.llm(checkpoints("v2"), 2, **options) as llm:
            split_once(llm)
            pids = list(llm.client.group.pids.values())
            if cycle == WARM_UP:
                before = {pid: (held(pid), resident_bytes(pid)) for pid in pids}
            if cycle == CYCLES - 1:
                for pid in pids:
                    assert held(pid) == before[pid][0]
                    assert (resident_bytes(pid) - before[pid][1]) / (CYCLES - 1 - WARM_UP) < MAX_GROWTH_BYTES


@pytest.mark.timeout(900)
def test_groups_of_new_ranks(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 times from nothing to a split step and back: the front keeps nothing, no process and no file is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before: tuple[int, int] = (0, 0)
    bytes_before = 0
    options: dict[str, Any] = OVERLAP | {"kv_cache_memory_bytes": 16 << 20, "skip_tokenizer_init": True}
    for cycle in range(20):
        with LLM(str(checkpoints("v2")), data_parallel_size=2, enable_expert_parallel=True, **options) as llm:
            split_once(llm)
            pids = list(llm.client.group.pids.values())
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not list(tmp_path.iterdir())
        if cycle == 2:
            before, bytes_before = held(), resident_bytes()
    assert held() == before
    assert (resident_bytes() - bytes_before) / 17 < MAX_GROWTH_BYTES
