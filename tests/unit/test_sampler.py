"""Draws and their distribution, greedy choice, errors and log-probabilities."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import FILTERS, VOCAB, make, reference_filter, softmax, some_logits
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.errors import HocketError
from hocket.outputs import TokenLogprobs
from hocket.worker.noise import exponential_noise, stream_key
from hocket.worker.sampler import Sampler, gather_logprobs, prompt_logprobs

# -- draws --------------------------------------------------------------------------------------------------------


def chi_square(counts: Counter[int], probs: list[float], num_draws: int) -> float:
    """Statistic over its degrees of freedom: about 1, and hardly ever above 2 for 10 or more."""
    cells = [(counts[i], p * num_draws) for i, p in enumerate(probs) if p * num_draws >= 5]
    rest = sum(p for p in probs if p * num_draws < 5) * num_draws
    if rest >= 5:
        cells.append((num_draws - sum(n for n, _ in cells), rest))
    return sum((n - expected) ** 2 / expected for n, expected in cells) / (len(cells) - 1)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 14, "top_p": 0.97}, {"min_p": 0.01}])
@pytest.mark.parametrize("along", ["seeds", "steps"])
def test_draws_follow_the_distribution(params: dict[str, Any], along: str) -> None:
    num_draws, logits = 4000, some_logits(1, seed=3) / 2
    if along == "seeds":
        requests = [make(seed=i, **params) for i in range(num_draws)]
    else:
        requests = [make(seed=5, output=[0] * i, **params) for i in range(num_draws)]
    tokens = Sampler().sample(logits.expand(num_draws, -1), requests).token_ids
    kept = reference_filter(logits[0].tolist(), requests[0].params)
    values = [v / requests[0].params.temperature for v in logits[0].tolist()]
    probs = softmax([v if k else -math.inf for v, k in zip(values, kept, strict=True)])
    counts = Counter(tokens)
    assert all(probs[token] > 0 for token in counts)
    assert 0.15 < chi_square(counts, probs, num_draws) < 2


def test_consecutive_draws_are_independent() -> None:
    num_draws = 4000
    logits = torch.zeros(num_draws, 4)
    requests = [make(seed=9, output=[0] * i) for i in range(num_draws)]
    tokens = Sampler().sample(logits, requests).token_ids
    pairs = Counter(a * 4 + b for a, b in itertools.pairwise(tokens))
    assert 0.15 < chi_square(pairs, [1 / 16] * 16, num_draws - 1) < 2


def test_noise_is_exponential() -> None:
    keys = torch.tensor([stream_key(seed, step) for seed in range(8) for step in range(8)])
    noise = exponential_noise(keys, 5000).flatten()
    assert (noise > 0).all()
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 1) < 0.01
    assert abs(noise.var().item() - 1) < 0.03
    for bound in (1e-4, 1e-2, 0.5, 2.0, 6.0):
        expected = 1 - math.exp(-bound)
        deviation = math.sqrt(expected * (1 - expected) / noise.numel())
        assert abs((noise < bound).double().mean().item() - expected) < 4 * deviation


def test_splitmix_reference_values() -> None:
    """The first outputs of SplitMix64 with state 1234567, as published with its reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    noise = exponential_noise(torch.tensor([1234567]), 3)[0].tolist()
    for value, x in zip(noise, published, strict=True):
        uniform = ((x & (2**63 - 1)) | 1) / 2**63
        assert math.isclose(value, -math.log1p(-uniform), rel_tol=1e-5)


def test_a_draw_depends_on_nothing_but_its_own_row() -> None:
    logits = some_logits(40, 300, seed=1)
    requests = [
        make(name=str(i), seed=i, output=[i % 7] * (i % 5), **FILTERS[i % len(FILTERS)], logprobs=i % 3 or None)
        for i in range(40)
    ]
    requests[3] = make(temperature=0)
    together = Sampler().sample(logits, requests)
    for i, request in enumerate(requests):
        alone = Sampler().sample(logits[i : i + 1], [request])
        assert alone.token_ids == [together.token_ids[i]]
        request.num_preemptions += 1
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    mixed = Sampler().sample(logits[order], [requests[i] for i in order])
    assert mixed.token_ids == [together.token_ids[i] for i in order]
    assert [(m is None) for m in mixed.logprobs] == [together.logprobs[i] is None for i in order]


def test_noise_made_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, requests = some_logits(10), [make(seed=i) for i in range(10)]
    whole = Sampler().sample(logits, requests).token_ids
    monkeypatch.setattr("hocket.worker.sampler._NOISE_ELEMENTS", 3 * VOCAB)
    assert Sampler().sample(logits, requests).token_ids == whole


def test_seeds_and_steps_differ() -> None:
    logits = torch.zeros(64, 1000)
    by_seed = Sampler().sample(logits, [make(seed=i) for i in range(64)]).token_ids
    by_step = Sampler().sample(logits, [make(output=[0] * i) for i in range(64)]).token_ids
    assert len(set(by_seed)) > 50
    assert len(set(by_step)) > 50
    keys = {stream_key(seed, step) for seed in range(50) for step in range(50)}
    assert len(keys) == 2500


# -- greedy, errors -----------------------------------------------------------------------------------------------


def test_of_equal_logits_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [77, 4000]] = 3.0
    logits[1, 17:] = 3.0
    requests = [make(temperature=0), make(temperature=0)]
    assert Sampler().sample(logits, requests).token_ids == [77, 17]
    biased = [make(temperature=0, logit_bias={0: -1.0}), make(temperature=0, logit_bias={0: -1.0})]
    assert Sampler().sample(logits, biased).token_ids == [77, 17]


def test_no_rows() -> None:
    sampled = Sampler().sample(torch.zeros(0, VOCAB), [])
    assert (sampled.token_ids, sampled.logprobs) == ([], [])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"temperature": 0, "logit_bias": {5: 1.0}}])
def test_logits_that_are_not_finite_name_the_request(wrong: float, params: dict[str, Any]) -> None:
    logits = some_logits(3)
    logits[1, 5] = wrong
    with pytest.raises(HocketError, match="'second'"):
        Sampler().sample(logits, [make(name=name, **params) for name in ("first", "second", "third")])
    logits[2] = -math.inf
    with pytest.raises(HocketError, match="'second' and 1 more"):
        Sampler().sample(logits, [make(name=name, **params) for name in ("first", "second", "third")])


@pytest.mark.parametrize("params", [{"temperature": 0}, {}])
def test_nothing_likely_among_the_allowed_tokens_is_an_error(params: dict[str, Any]) -> None:
    logits = some_logits(2)
    logits[1, [3, 5]] = -math.inf
    requests = [make(name=name, allowed_token_ids=[3, 5], **params) for name in ("first", "second")]
    with pytest.raises(HocketError, match="'second' are not finite"):
        Sampler().sample(logits, requests)


# -- log-probabilities --------------------------------------------------------------------------------------------


def reference_logprobs(row: list[float], token: int, count: int) -> TokenLogprobs:
    logprobs = [math.log(p) if p else -math.inf for p in softmax(row)]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: len(row) if count < 0 else count]
    rank = 1 + sum(v > row[token] for v in row)
    return TokenLogprobs([token, *order], [logprobs[i] for i in (token, *order)], rank)


def assert_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs) -> None:
    assert found is not None
    assert (found.token_ids, found.rank) == (expected.token_ids, expected.rank)
    assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-4, abs=1e-5)


def test_logprobs_are_the_models_own() -> None:
    logits = some_logits(6)
    wanted = [None, 0, 1, 5, -1, 100]
    requests = [
        make(logprobs=count, temperature=0.5, top_k=3, logit_bias={3: 9.0}, repetition_penalty=1.5) for count in wanted
    ]
    sampled = Sampler().sample(logits, requests)
    assert sampled.logprobs[0] is None
    for i, count in enumerate(wanted[1:], start=1):
        assert_logprobs(sampled.logprobs[i], reference_logprobs(logits[i].tolist(), sampled.token_ids[i], count or 0))


def test_prompt_logprobs() -> None:
    logits, ids = some_logits(4), [3, 0, 23, 7]
    for count in (0, 2, -1):
        found = prompt_logprobs(logits, ids, count)
        for row, token, one in zip(logits.tolist(), ids, found, strict=True):
            assert_logprobs(one, reference_logprobs(row, token, count))
    assert prompt_logprobs(logits[:0], [], 3) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.25, 2.0]), min_size=4, max_size=40), st.integers(0, 45))
def test_equal_logprobs_are_ordered_by_id(row: list[float], count: int) -> None:
    [found] = gather_logprobs(torch.tensor([row]), [1], [count])
    assert_logprobs(found, reference_logprobs(row, 1, count))


def test_equal_logprobs_at_the_border_in_some_rows() -> None:
    logits = some_logits(5, 30)
    logits[1, [4, 9, 20]] = 50.0
    logits[3, 7:] = -math.inf
    for count in (1, 2, 3, 10, 29):
        for i, found in enumerate(gather_logprobs(logits, [4] * 5, [count] * 5)):
            assert_logprobs(found, reference_logprobs(logits[i].tolist(), 4, count))


def test_many_rows_at_once_equal_each_on_its_own() -> None:
    logits = some_logits(150, 50)
    ids, wanted = [i % 50 for i in range(150)], [(-1, 0, 3, 49, 50)[i % 5] for i in range(150)]
    found = gather_logprobs(logits, ids, wanted)
    assert found == [gather_logprobs(logits[i : i + 1], [ids[i]], [wanted[i]])[0] for i in range(150)]


@pytest.mark.parametrize("count", [5, -1])
def test_memory_for_logprobs_is_bounded(count: int) -> None:
    """Tensors alive at once, in elements of the vocabulary: those of some rows, however many there are."""
    live = peak = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal live, peak
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and not any(tensor is arg for arg in args):
                    size = tensor.untyped_storage().nbytes()
                    if all(
                        tensor.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
                        for a in args
                        if isinstance(a, torch.Tensor)
                    ):
                        live += size
                        peak = max(peak, live)
                        weakref.finalize(tensor, lose, size)
            return result

    def lose(size: int) -> None:
        nonlocal live
        live -= size

    logits = some_logits(256, 400)
    with Watch():
        prompt_logprobs(logits, [3] * 256, count)
    assert 0 < peak < logits.untyped_storage().nbytes() * 0.75
