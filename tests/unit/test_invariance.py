"""Whole models, attention and experts: the same bits for a token however its request is chunked and whatever is beside
it. Which backends hold this is what `config/backends.py` says of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import paged
import pytest
import torch
from checkpoints import CONFIGS, hf_reference, make
from torch import Tensor

from hocket.config.backends import ATTENTION, CPU_ATTENTION, CPU_EXPERTS, EXPERTS
from hocket.models.backends import Backends, backends_for
from hocket.models.base import CausalLM
from hocket.moe.experts.registry import experts_class

LENGTHS = (37, 5, 1, 60)
Step = list[tuple[str, list[int]]]


def whole(prompts: dict[str, list[int]]) -> list[Step]:
    """Each request alone, in one step."""
    return [[(name, tokens)] for name, tokens in prompts.items()]


def together(prompts: dict[str, list[int]], size: int) -> list[Step]:
    """All requests beside each other, in chunks of `size` tokens."""
    longest = max(map(len, prompts.values()))
    return [
        [(name, tokens[first : first + size]) for name, tokens in prompts.items() if first < len(tokens)]
        for first in range(0, longest, size)
    ]


def staggered(prompts: dict[str, list[int]]) -> list[Step]:
    """Chunks of all sizes from 1 on, in another order of requests each step."""
    cuts = {
        name: [*(i for i in (1, 2, 4, 15, 16, 18, 31, 33, 48) if i < len(tokens)), len(tokens)]
        for name, tokens in prompts.items()
    }
    chunks = {name: [tokens[a:b] for a, b in pairwise([0, *cuts[name]])] for name, tokens in prompts.items()}
    steps = []
    for i in range(max(map(len, chunks.values()))):
        step = [(name, parts[i]) for name, parts in chunks.items() if i < len(parts)]
        steps.append(step[i % len(step) :] + step[: i % len(step)])
    return steps


SCHEDULES: dict[str, Callable[[dict[str, list[int]]], list[Step]]] = {
    "one by one": lambda prompts: together(prompts, 1),
    "chunks of 11": lambda prompts: together(prompts, 11),
    "chunks of 16": lambda prompts: together(prompts, 16),
    "all at once": lambda prompts: together(prompts, 1000),
    "staggered": staggered,
}


def logits_of(model: CausalLM, steps: list[Step], block_size: int, seed: int) -> dict[str, Tensor]:
    """fp32 [length, V] of each request; some steps have padding rows."""
    run = paged.PagedRun(model, block_size=block_size, num_blocks=40 + 400 // block_size, seed=seed)
    parts: dict[str, list[Tensor]] = {}
    for i, step in enumerate(steps):
        for name, logits in run.step(step, num_padding=(0, 3, 0, 17)[i % 4]).items():
            parts.setdefault(name, []).append(logits)
    return {name: torch.cat(found) for name, found in parts.items()}


def num_unlike(model: CausalLM, prompts: dict[str, list[int]]) -> dict[str, int]:
    """By schedule, for how many requests some logit is not what it is when the request is computed alone and whole."""
    alone = logits_of(model, whole(prompts), 16, seed=0)
    found = {}
    for i, (name, schedule) in enumerate(SCHEDULES.items()):
        logits = logits_of(model, schedule(prompts), (1, 3, 16, 7, 5)[i], seed=i)
        found[name] = sum(not torch.equal(logits[key], alone[key]) for key in prompts)
    return found


def load(name: str, root: Path, backends: Backends, dtype: torch.dtype = torch.float32) -> CausalLM:
    return paged.load(make(name, root), dtype, experts_backend="tiled", backends=backends)


@pytest.mark.parametrize(
    ("name", "threads"),
    [*((name, 1) for name in CONFIGS), ("v2-groups", 2), ("v3-halves", 2), ("qwen3-yarn", 2)],
    indirect=["threads"],
)
def test_models(name: str, threads: int, checkpoints: Path) -> None:
    """And they are right: as near to transformers as without the flag."""
    path = make(name, checkpoints)
    model = load(name, checkpoints, backends_for("tiled", deterministic=True))
    prompts = {str(i): prompt for i, prompt in enumerate(hf_reference(path).prompts(list(LENGTHS), 1))}
    assert num_unlike(model, prompts) == dict.fromkeys(SCHEDULES, 0)
    for key, logits in logits_of(model, whole(prompts), 16, seed=0).items():
        torch.testing.assert_close(logits, hf_reference(path).logits(prompts[key]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_models_in_few_bits(name: str, dtype: torch.dtype, checkpoints: Path) -> None:
    model = load(name, checkpoints, backends_for("tiled", deterministic=True), dtype)
    prompts = {str(n): [3 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS}
    assert num_unlike(model, prompts) == dict.fromkeys(SCHEDULES, 0)


@pytest.mark.parametrize("attention", CPU_ATTENTION)
@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_which_attention_is_invariant(name: str, attention: str, checkpoints: Path) -> None:
    """With all else invariant, so that a difference is attention's."""
    model = load(name, checkpoints, backends_for(attention, deterministic=True))
    prompts = {str(n): [3 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS}
    assert (sum(num_unlike(model, prompts).values()) == 0) == ATTENTION[attention]


@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_kernels_matter(name: str, checkpoints: Path) -> None:
    """The control for the kernels, as the one above is for attention."""
    model = load(name, checkpoints, backends_for("tiled", deterministic=False))
    prompts = {str(n): [3 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS}
    assert sum(num_unlike(model, prompts).values()) > 0


@pytest.mark.parametrize("experts_backend", CPU_EXPERTS)
def test_which_experts_are_invariant(experts_backend: str, threads: int) -> None:
    """Every row alone, against batches of all sizes with other rows, dropped slots among them."""
    num_rows, num_experts, top_k = 200, 8, 4
    generator = torch.Generator().manual_seed(3)
    experts = experts_class(experts_backend)(num_experts, 64, 32, dtype=torch.float32)
    for weight in (experts.w13, experts.w2):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    x, weights = torch.randn(num_rows, 64, generator=generator), torch.rand(num_rows, top_k, generator=generator)
    ids = torch.rand(num_rows, num_experts, generator=generator).topk(top_k).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    alone = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(num_rows)])
    unlike = 0
    for count in (1, 2, 3, 7, 16, 17, 33, 64, 100, 151, num_rows):
        rows = torch.randperm(num_rows, generator=generator)[:count]
        unlike += not torch.equal(experts(x[rows], ids[rows], weights[rows]), alone[rows])
    assert (unlike == 0) == EXPERTS[experts_backend]
