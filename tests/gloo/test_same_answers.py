"""The whole engine against transformers: same tokens, log-probabilities within 1e-5, whatever the settings.

Each cell serves 16 prompts of 1 to 300 tokens that arrive at different steps and compares every greedy token and the
log-probabilities of the likeliest tokens at every generated position with transformers' on the same checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import settled_stats
from checkpoints import hf_reference
from gloo_groups import Groups
from pairwise import Cell, full_grid, pairwise_cover

from hocket.config.backends import PLACEMENTS
from hocket.llm import LLM
from hocket.outputs import RequestOutput
from hocket.request import SamplingParams

NUM_TOKENS = 32
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64, 100, 129, 200, 300)
TOP = 8
TOLERANCE = 1e-5
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": ("v2", "v2-groups", "v2-yarn", "v3", "v3-yarn", "qwen3", "qwen3-no-norm"),
    "ranks": (1, 2, 3, 4),
    "prefix_caching": (False, True),
    "chunk": (0, 16),
    "transport": ("torch", "allgather_reducescatter"),
    "experts": ("reference", "grouped_mm"),
    "layout": ("published", "fused", "fused-sharded", "old-config"),
    "placement": PLACEMENTS,
}


def allowed(cell: Cell) -> bool:
    """One rank has no transport and nothing to place."""
    return cell["ranks"] > 1 or (cell["transport"] == "torch" and cell["placement"] == "linear")


COVER = pairwise_cover(DIMENSIONS, allowed)


def grid() -> list[Cell]:
    """Every combination; placement, which changes only who holds which expert, alternates instead of doubling it."""
    rest = {name: values for name, values in DIMENSIONS.items() if name != "placement"}
    cells = full_grid(rest, lambda cell: allowed(cell | {"placement": "linear"}))
    both = DIMENSIONS["placement"]
    return [cell | {"placement": both[i % 2] if cell["ranks"] > 1 else both[0]} for i, cell in enumerate(cells)]


def cell_id(cell: Cell) -> str:
    return "-".join(str(value) for value in cell.values())


@functools.cache
def prompts_of(path: Path) -> list[list[int]]:
    """Prompts whose routing and greedy margins, over all tokens that are compared, make an answer unambiguous."""
    return hf_reference(path).prompts(list(LENGTHS), num_tokens=NUM_TOKENS, seed=1)


def run(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """All prompts, arriving in four groups at different steps."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=TOP)
    waiting = [(str(i), prompt, params, None) for i, prompt in enumerate(prompts)]
    client, done = llm.client, {}
    for start in range(0, len(waiting), 4):
        client.add_many(waiting[start : start + 4])
        for _ in range(2):
            done |= {result.request_id: result for result in client.poll(20.0) if result.finished}
    while client.has_unfinished:
        done |= {result.request_id: result for result in client.poll(20.0) if result.finished}
    return [done[str(i)] for i in range(len(prompts))]


@functools.cache
def expected(path: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """transformers' log-probabilities fp32 [T, V] over a whole sequence."""
    return hf_reference(path).logits(list(token_ids)).log_softmax(-1)


def check(path: Path, result: RequestOutput) -> float:
    """Greedy tokens equal transformers'; returns the largest |Δ log-probability|."""
    completion = result.outputs[0]
    prompt = result.prompt_token_ids
    assert len(completion.token_ids) == NUM_TOKENS
    assert completion.logprobs is not None
    logprobs = expected(path, tuple(prompt + completion.token_ids))[len(prompt) - 1 : -1]
    # Teacher-forced on our own tokens: each is transformers' greedy choice after the ones before it.
    assert logprobs.argmax(-1).tolist() == completion.token_ids, f"prompt of {len(prompt)} tokens"
    worst = 0.0
    for position, ours in enumerate(completion.logprobs):
        assert len(ours) == TOP
        for token_id, value in ours.items():
            difference = abs(value.logprob - float(logprobs[position, token_id]))
            worst = difference if not difference <= worst else worst  # NaN is the worst of all
    return worst


def run_cell(groups: Groups, checkpoints: Callable[..., Path], cell: Cell) -> None:
    path = checkpoints(cell["model"], cell["layout"])
    options: dict[str, Any] = {
        "enable_prefix_caching": cell["prefix_caching"],
        "long_prefill_token_threshold": cell["chunk"],
        "max_num_batched_tokens": 64 if cell["chunk"] else 512,
        "moe_backend": cell["experts"],
        "expert_placement_strategy": cell["placement"],
        "block_size": 8,
        "max_num_seqs": 16,
    }
    if cell["ranks"] > 1:
        options["all2all_backend"] = cell["transport"]
    # One reference for all layouts of a model: they hold the same weights.
    reference = checkpoints(cell["model"], "published")
    with groups.llm(path, cell["ranks"], **options) as llm:
        for repeat in range(2 if cell["prefix_caching"] else 1):  # the second time prompts are cached
            results = run(llm, prompts_of(reference))
            for result in results:
                assert check(reference, result) < TOLERANCE
            if repeat:
                assert sum(result.num_cached_tokens or 0 for result in results) > 0
        steps = [rank["steps"] for rank in settled_stats(llm)]
        assert len(set(steps)) == 1, f"ranks took different numbers of steps: {steps}"


@pytest.mark.parametrize("cell", COVER, ids=cell_id)
def test_pairwise(groups: Groups, checkpoints: Callable[..., Path], cell: Cell) -> None:
    run_cell(groups, checkpoints, cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", grid(), ids=cell_id)
def test_full_grid(groups: Groups, checkpoints: Callable[..., Path], cell: Cell) -> None:
    run_cell(groups, checkpoints, cell)
