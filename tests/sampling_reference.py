"""Sampling parameters in plain Python, and requests to try them on."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from hocket.request import EngineRequest, Request, SamplingParams

VOCAB = 24


def make(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    *,
    name: str = "r",
    eos: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
    **params: Any,
) -> Request:
    options: dict[str, Any] = {"seed": 0, "max_tokens": None} | params
    request = Request(
        EngineRequest(name, prompt or [1, 2], SamplingParams(**options), eos or [], bad_words or [], 1000)
    )
    request.token_ids += output or []
    return request


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def reference_process(logits: list[float], request: Request) -> list[float]:
    params, output = request.params, request.output_token_ids
    values = list(logits)
    if params.allowed_token_ids is not None:
        values = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(values)]
    for word in request.bad_words_ids:
        if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]:
            values[word[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in [*request.eos_token_ids, *(params.stop_token_ids or [])]:
            values[token] = -math.inf
    for token in set(request.token_ids):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(output).items():
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    return values


def softmax(values: list[float]) -> list[float]:
    largest = max(values)
    weights = [math.exp(v - largest) for v in values]
    return [w / sum(weights) for w in weights]


def reference_filter(logits: list[float], params: SamplingParams) -> list[bool]:
    """Which tokens may be drawn."""
    values = [v / params.temperature for v in logits]
    probs = softmax(values)
    kept = [p >= params.min_p * max(probs) for p in probs]
    values = [v if k else -math.inf for v, k in zip(values, kept, strict=True)]
    order = sorted(range(len(values)), key=lambda i: -values[i])[: params.top_k or len(values)]
    probs = softmax([values[i] for i in order])
    before, last = 0.0, -math.inf
    for token, prob in zip(order, probs, strict=True):
        if before < params.top_p:
            last = values[token]
        before += prob
    return [v >= last and v > -math.inf for v in values]


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {},
]
