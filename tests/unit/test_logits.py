"""Masks, bias, penalties and filters against the plain reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_reference import FILTERS, VOCAB, make, reference_filter, reference_process, some_logits

from hocket.worker.logits import _logsumexp, banned_ids, filter_logits, process_logits
from hocket.worker.sampler import Sampler

FEATURES: list[dict[str, Any]] = [
    {},
    {"allowed_token_ids": [3, 7, 11]},
    {"bad_words": [[4], [6, 9], [5, 6, 10], [9, 9]], "output": [5, 6]},
    {"bad_words": [[2, 9]], "prompt": [1, 2]},  # the prompt is not looked at
    {"logit_bias": {3: 5.0, 4: -20.0}},
    {"min_tokens": 3, "output": [5, 6], "eos": [1], "stop_token_ids": [2, 3]},
    {"min_tokens": 2, "output": [5, 6], "eos": [1], "stop_token_ids": [2, 3]},
    {"repetition_penalty": 1.7, "output": [5, 5, 6]},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.8, "output": [5, 5, 6]},
    {"presence_penalty": -1.5, "output": [5, 5, 6]},
    {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "output": [3, 5, 5],
        "logit_bias": {5: 2.0},
        "bad_words": [[5, 7]],
        "allowed_token_ids": [1, 3, 5, 7, 9],
        "min_tokens": 9,
        "eos": [9],
    },
]


def test_processing_equals_the_reference_in_a_mixed_batch() -> None:
    requests = [make(**feature) for feature in FEATURES]
    logits = some_logits(len(requests))
    before = logits.clone()
    processed = process_logits(logits, requests)
    assert torch.equal(logits, before)
    expected = torch.tensor([reference_process(row, r) for row, r in zip(logits.tolist(), requests, strict=True)])
    torch.testing.assert_close(processed, expected)


@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_takes_the_largest_processed_logit(feature: dict[str, Any]) -> None:
    request = make(**feature, temperature=0)
    for seed in range(5):
        logits = some_logits(1, seed=seed)
        expected = reference_process(logits[0].tolist(), request)
        [token] = Sampler().sample(logits, [request]).token_ids
        assert token == expected.index(max(expected))


def test_nothing_to_process_copies_nothing() -> None:
    logits = some_logits(2)
    assert process_logits(logits, [make(), make(min_tokens=1, output=[3], eos=[1])]) is logits


def test_bans_never_leave_nothing() -> None:
    assert banned_ids(make(allowed_token_ids=[1, 2], min_tokens=1, eos=[1], stop_token_ids=[2])) == set()
    assert banned_ids(make(allowed_token_ids=[1, 2], min_tokens=1, eos=[1])) == {1}


@pytest.mark.parametrize("vocab", [VOCAB, 700])
def test_filters_equal_the_reference_in_a_mixed_batch(vocab: int) -> None:
    requests = [make(**params) for params in FILTERS]
    for seed in range(4):
        logits = some_logits(len(requests), vocab, seed) / 3
        filtered = logits.clone()
        filter_logits(filtered, requests)
        for row, new, request in zip(logits.tolist(), filtered, requests, strict=True):
            assert (new > -math.inf).tolist() == reference_filter(row, request.params)
            kept = [
                (a, b / request.params.temperature) for a, b in zip(new.tolist(), row, strict=True) if a > -math.inf
            ]
            assert all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in kept)


def test_equal_logits_at_the_border_all_stay() -> None:
    logits = torch.zeros(3, 8)
    filter_logits(logits, [make(top_k=2), make(top_p=0.1), make(min_p=1.0)])
    assert (logits == 0).all()


def test_top_p_over_more_tokens_than_looked_at_first() -> None:
    logits = torch.linspace(1, 0, 5000).repeat(2, 1)
    requests = [make(top_p=0.9), make(top_p=0.9, top_k=20)]
    filtered = logits.clone()
    filter_logits(filtered, requests)
    for row, new, request in zip(logits.tolist(), filtered, requests, strict=True):
        expected = reference_filter(row, request.params)
        assert abs(sum(expected) - int((new > -math.inf).sum())) <= 1


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_what_top_p_sums_depends_on_no_other_row(threads: int) -> None:
    """Wide rows and several threads: there torch's logsumexp sums a row otherwise where there are few."""
    torch.manual_seed(0)
    x = torch.randn(64, 50_257)
    alone = torch.cat([row[None].logsumexp(dim=-1) for row in x])
    assert any(not torch.equal(x[:n].logsumexp(dim=-1), alone[:n]) for n in (2, 5, 16, 33, 64)), "the control"
    expected = torch.cat([_logsumexp(row[None]) for row in x])
    torch.testing.assert_close(expected, alone)
    for n in (1, 2, 3, 5, 16, 33, 64):
        assert torch.equal(_logsumexp(x[:n]), expected[:n])
