"""Compares the answers of an engine with transformers' and gives requests to chosen ranks. For tests only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import hf_reference

from hocket.llm import LLM
from hocket.outputs import RequestOutput
from hocket.request import SamplingParams


def greedy(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **values)


def ids_of(results: Sequence[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@functools.cache
def reference_logprobs(path: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """transformers' log-probabilities fp32 [T, V] over a whole sequence."""
    return hf_reference(path).logits(list(token_ids)).log_softmax(-1)


def assert_right(path: Path, results: Sequence[RequestOutput], tolerance: float = 1e-4) -> None:
    """Every token is transformers' greedy choice after those before it; log-probabilities, where asked for, equal."""
    for result in results:
        completion, prompt = result.outputs[0], result.prompt_token_ids
        expected = reference_logprobs(path, tuple(prompt + completion.token_ids))[len(prompt) - 1 : -1]
        assert expected.argmax(-1).tolist() == completion.token_ids, f"{result.request_id}: prompt of {len(prompt)}"
        for row, position in enumerate(completion.logprobs or ()):
            for token_id, ours in position.items():
                assert abs(ours.logprob - float(expected[row, token_id])) < tolerance


def prompts(path: Path, lengths: Sequence[int], num_tokens: int = 1, seed: int = 0) -> list[list[int]]:
    """Random prompts without near ties in their routing or in the first `num_tokens` greedy tokens."""
    return hf_reference(path).prompts(list(lengths), num_tokens, seed)


def expert_load(path: Path, results: Sequence[RequestOutput]) -> list[torch.Tensor]:
    """How often transformers' routers choose each expert, by sparse layer, over what an engine computed for `results`.

    (Every token but the last generated one, and nothing twice: for engines without prefix cache and preemptions.)
    """
    reference = hf_reference(path).model
    num_experts = next(
        module for module in reference.modules() if type(module).__name__.endswith("Router")
    ).weight.shape[0]
    totals: list[torch.Tensor] = []
    for result in results:
        chosen = chosen_experts(path, result.prompt_token_ids + result.outputs[0].token_ids[:-1])
        counts = [torch.bincount(ids.flatten(), minlength=num_experts) for ids in chosen]
        totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else counts
    return totals


def chosen_experts(path: Path, token_ids: list[int]) -> list[torch.Tensor]:
    """The ids [T, K] that each of transformers' sparse layers gives its experts."""
    model, chosen = hf_reference(path).model, []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
        for module in model.modules()
        if type(module).__name__.endswith(("MoeExperts", "NaiveMoe", "MoEExperts", "V3Experts"))
    ]
    assert hooks
    with torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return chosen


def settled_stats(llm: LLM, *, reset: bool = False) -> list[dict[str, Any]]:
    """Counters of all ranks once they sleep. (Right after an answer they may still take the step that finds no work.)

    A rank that is awake takes a step between two questions, so it sleeps when two answers are the same.
    """
    stats = llm.stats()
    while (again := llm.stats()) != stats:
        stats = again
    if reset:
        llm.stats(reset=True)
    return stats


def steps_of(llm: LLM) -> int:
    """Steps since the start or the last reset, which must be equally many on all ranks."""
    steps = [rank["steps"] for rank in settled_stats(llm)]
    assert len(set(steps)) == 1, f"ranks took different numbers of steps: {steps}"
    return int(steps[0])


NOISE = 0.05
"""Log-probability by which rounding to bf16 alone may have a small random model choose a worse token."""


def shortfall(path: Path, results: Sequence[RequestOutput]) -> float:
    """Largest log-probability by which a chosen token falls short of the best one, after those before it, for
    transformers in fp32. So it does not matter that everything behind another choice is other, too."""
    worst = 0.0
    for result in results:
        ids, prompt = result.outputs[0].token_ids, result.prompt_token_ids
        expected = reference_logprobs(path, tuple(prompt + ids))[len(prompt) - 1 : -1]
        worst = max(worst, float((expected.amax(-1) - expected[range(len(ids)), ids]).max()))
    return worst


def assert_as_good(path: Path, results: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    """`results`, made in bf16, fall short of the best tokens by hardly more than `others`."""
    found, allowed = shortfall(path, results), max(2 * shortfall(path, others), NOISE)
    assert found <= allowed, f"a token is {found:.3f} worse than the best one, {allowed:.3f} may come of rounding"
