"""Dual batch overlap in the whole engine: the same answers as without it, and each case was really split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo_groups import Groups
from pairwise import Cell, pairwise_cover

from hocket.llm import LLM
from hocket.request import SamplingParams

TOP = 4
TOLERANCE = 1e-5
SIZES = (
    (8, 8), (8, 7), (8, 1), (1, 8), (1, 1), (0, 8), (8, 0), (2, 2), (3, 3), (33, 0), (64, 1), (64, 2), (2, 64), (40, 3)
)  # fmt: skip
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": ("v2", "v2-groups", "v3-yarn", "qwen3"),
    "transport": ("torch", "allgather_reducescatter", "emulated"),
    "executor": ("greenlet", "thread"),
    "ubatches": (2, 3, 4),
    "sizes": SIZES,
    "phase": ("prefill", "decode", "mixed"),
    "prefix_caching": (False, True),
    "chunk": (0, 16),
    "threshold": ("least", 8),
}
COVER = pairwise_cover(DIMENSIONS, lambda cell: True)


def prompts_of(cell: Cell) -> list[tuple[list[int], int]]:
    """(prompt, rank): tokens per rank as in the cell; in decode that many requests, in prefill one prompt of them."""
    found = []
    for rank, size in enumerate(cell["sizes"]):
        if size == 0:
            continue
        if cell["phase"] == "prefill":
            found.append(([3 + (7 * i + rank) % 500 for i in range(size)], rank))
        elif cell["phase"] == "decode":
            found += [([3 + (11 * i + rank) % 500, 5, 3 + i], rank) for i in range(size)]
        else:
            found += [([3 + (5 * i + rank) % 500] * (1 + 3 * (i % 2)), rank) for i in range(max(1, size // 2))]
    return found


def run(llm: LLM, cell: Cell, repeats: int) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=TOP)
    pairs = prompts_of(cell)
    results: list[Any] = []
    for _ in range(repeats):
        results = llm.generate([p for p, _ in pairs], params, data_parallel_rank=[r for _, r in pairs])
    return results


def check_same(ours: list[Any], reference: list[Any]) -> None:
    for mine, other in zip(ours, reference, strict=True):
        a, b = mine.outputs[0], other.outputs[0]
        assert a.token_ids == b.token_ids
        for left, right in zip(a.logprobs, b.logprobs, strict=True):
            for token_id in left.keys() & right.keys():
                assert abs(left[token_id].logprob - right[token_id].logprob) < TOLERANCE


def options_of(cell: Cell) -> dict[str, Any]:
    transport = cell["transport"]
    emulated = transport == "emulated"
    return {
        "all2all_backend": "torch" if emulated else transport,
        "enable_prefix_caching": cell["prefix_caching"],
        "long_prefill_token_threshold": cell["chunk"],
        "max_num_seqs": 64,
        "max_num_batched_tokens": 128,
        "block_size": 4,
        "max_model_len": 128,
        **({"emulate_link_gb_per_s": 1.0, "emulate_link_latency_us": 50.0} if emulated else {}),
    }


def overlap_options(cell: Cell) -> dict[str, Any]:
    least = cell["ubatches"] if cell["threshold"] == "least" else 8
    return {
        "ubatch_size": cell["ubatches"],
        "ubatch_executor": cell["executor"],
        "dbo_decode_token_threshold": least,
        "dbo_prefill_token_threshold": least,
    }


def expect_split(cell: Cell) -> bool:
    """Whether the first step of all working ranks reaches the threshold (later ones only have more decodes alike)."""
    least = cell["ubatches"] if cell["threshold"] == "least" else 8
    working = [size for size in cell["sizes"] if size]
    if cell["phase"] == "prefill":
        return all(min(size, cell["chunk"] or size) >= least for size in working)
    if cell["phase"] == "decode":
        return all(size >= least for size in working)
    return False


@pytest.mark.parametrize("cell", COVER, ids=lambda cell: "-".join(map(str, cell.values())).replace(" ", ""))
def test_same_answers(groups: Groups, checkpoints: Callable[..., Path], cell: Cell) -> None:
    path = checkpoints(cell["model"])
    repeats = 2 if cell["prefix_caching"] else 1
    with groups.llm(path, 2, **options_of(cell)) as llm:
        reference = run(llm, cell, repeats)
    with groups.llm(path, 2, **options_of(cell), **overlap_options(cell)) as llm:
        check_same(run(llm, cell, repeats), reference)
        for rank in llm.stats():
            overlap = rank["overlap"]
            assert sum(n for reasons in overlap["reasons"].values() for n in reasons.values()) == rank["steps"]
            assert overlap["split"] == sum(reasons.get("split", 0) for reasons in overlap["reasons"].values())
            assert sum(overlap["ubatch_tokens"].values()) == overlap["split"]
            assert all(key.count("+") == cell["ubatches"] - 1 for key in overlap["ubatch_tokens"])
            if expect_split(cell):
                assert overlap["split"] > 0
            assert rank["failed"] == 0
