"""`deterministic`: bit-equal tokens and log-probabilities whatever the batch, the chunks, the cut and the cache.

The reference of a model on a transport computes each probe alone: batch 1, whole prompts, no overlap, no prefix cache.
Every cell serves the probes among others, 32 requests at once, and compares every log-probability with `==`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import assert_right, prompts, settled_stats
from gloo_groups import Groups
from pairwise import Cell, full_grid, pairwise_cover

from hocket.llm import LLM
from hocket.outputs import Logprob, RequestOutput
from hocket.request import SamplingParams

Checkpoints = Callable[..., Path]
NUM_RANKS = 2
NUM_TOKENS = 6
BATCH = 32
LENGTHS = (1, 2, 5, 15, 16, 17, 33, 50)
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=6, prompt_logprobs=2)
RANDOM = SamplingParams(temperature=1.3, top_p=0.95, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": ("v2", "v2-groups", "v2-yarn", "v3", "v3-halves", "qwen3", "qwen3-yarn"),
    "transport": ("torch", "allgather_reducescatter"),
    "ubatches": (1, 2, 3, 4, "forced 2", "forced 3"),
    "executor": ("greenlet", "thread"),
    "chunk": (0, 11, 16),
    "prefix_caching": (False, True),
}


def allowed(cell: Cell) -> bool:
    return cell["ubatches"] != 1 or cell["executor"] == "greenlet"


Bits = tuple[list[int], list[list[tuple[int, float]]]]


def bits_of(result: RequestOutput) -> Bits:
    """All that the promise covers: token ids, log-probabilities of output and prompt."""

    def rows(positions: list[dict[int, Logprob] | None] | list[dict[int, Logprob]] | None) -> list[Any]:
        return [sorted((token, value.logprob) for token, value in (row or {}).items()) for row in positions or ()]

    completion = result.outputs[0]
    return completion.token_ids, rows(result.prompt_logprobs) + rows(completion.logprobs)


@functools.cache
def probes(path: Path) -> list[list[int]]:
    return prompts(path, LENGTHS, NUM_TOKENS, seed=3)


def traffic(count: int, seed: int) -> list[list[int]]:
    """Other requests, of up to 60 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(draw.randint(1, 60))] for _ in range(count)]


def serve(llm: LLM, given: list[list[int]], seed: int) -> list[RequestOutput]:
    """`given` twice, the second time drawn at random, and other requests up to BATCH, in random order and on random
    ranks; the results of `given` in order, greedy ones first."""
    draw = random.Random(seed)
    pairs = [(tokens, params) for params in (PARAMS, RANDOM) for tokens in given]
    pairs += [(tokens, PARAMS) for tokens in traffic(BATCH - len(pairs), seed)]
    order = draw.sample(range(len(pairs)), len(pairs))
    results = llm.generate(
        [pairs[i][0] for i in order],
        [pairs[i][1] for i in order],
        data_parallel_rank=[draw.randrange(NUM_RANKS) for _ in order],
    )
    found = dict(zip(order, results, strict=True))
    return [found[i] for i in range(2 * len(given))]


class Alone:
    """The reference bits of each model and transport, computed once."""

    def __init__(self, groups: Groups, checkpoints: Checkpoints) -> None:
        self._groups, self._checkpoints = groups, checkpoints
        self._bits: dict[tuple[str, str], list[Bits]] = {}

    def bits(self, model: str, transport: str) -> list[Bits]:
        if (model, transport) not in self._bits:
            path = self._checkpoints(model)
            options = {"max_num_seqs": 1, "enable_prefix_caching": False, "all2all_backend": transport}
            with self._groups.llm(path, NUM_RANKS, deterministic=True, **options) as llm:
                results = [
                    llm.generate([tokens], params, data_parallel_rank=[0])[0]
                    for params in (PARAMS, RANDOM)
                    for tokens in probes(path)
                ]
            assert_right(path, results[: len(LENGTHS)], tolerance=1e-5)
            self._bits[model, transport] = [bits_of(result) for result in results]
        return self._bits[model, transport]


@pytest.fixture(scope="module")
def alone(groups: Groups, checkpoints: Checkpoints) -> Alone:
    return Alone(groups, checkpoints)


def overlap_options(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    match str(cell["ubatches"]).split():
        case ["forced", n]:
            monkeypatch.setenv("HOCKET_FORCE_SPLIT", n)
            return {"ubatch_executor": cell["executor"]}
        case [n]:
            least = {"dbo_decode_token_threshold": max(2, int(n)), "dbo_prefill_token_threshold": max(2, int(n))}
            return {"ubatch_size": int(n), "ubatch_executor": cell["executor"], **least}
    raise AssertionError(cell)


def check_split(llm: LLM, cell: Cell) -> None:
    """Off: no step was split. On: steps were, and into as many parts as asked for."""
    for rank in settled_stats(llm):
        overlap = rank["overlap"]
        parts = int(str(cell["ubatches"]).split()[-1])
        assert (overlap["split"] > 0) == (parts > 1), overlap
        assert all(len(str(key).split("+")) == parts for key in overlap["ubatch_tokens"]), overlap


@pytest.mark.parametrize("cell", pairwise_cover(DIMENSIONS, allowed), ids=lambda c: "-".join(map(str, c.values())))
def test_bit_equal(
    groups: Groups, checkpoints: Checkpoints, alone: Alone, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    run_cell(groups, checkpoints, alone, monkeypatch, cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", full_grid(DIMENSIONS, allowed), ids=lambda c: "-".join(map(str, c.values())))
def test_full_grid(
    groups: Groups, checkpoints: Checkpoints, alone: Alone, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    run_cell(groups, checkpoints, alone, monkeypatch, cell)


def run_cell(
    groups: Groups, checkpoints: Checkpoints, alone: Alone, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    expected = alone.bits(cell["model"], cell["transport"])
    options = {
        "all2all_backend": cell["transport"],
        "long_prefill_token_threshold": cell["chunk"],
        "max_num_batched_tokens": 64 if cell["chunk"] else 1024,
        "max_num_seqs": BATCH,
        "enable_prefix_caching": cell["prefix_caching"],
        "block_size": 4,
        **overlap_options(cell, monkeypatch),
    }
    path = checkpoints(cell["model"])
    with groups.llm(path, NUM_RANKS, deterministic=True, **options) as llm:
        for repeat in range(1 + cell["prefix_caching"]):  # the second time most prompts are cached
            results = serve(llm, probes(path), seed=repeat)
            assert [bits_of(result) for result in results] == expected
            if repeat:
                assert sum(result.num_cached_tokens or 0 for result in results) > 0
        check_split(llm, cell)


@pytest.mark.parametrize("model", ["v3", "qwen3"])
def test_without_the_option_bits_differ(groups: Groups, checkpoints: Checkpoints, model: str) -> None:
    """The control: the same comparison finds differences where nothing is promised."""
    path = checkpoints(model)
    bits = []
    for max_num_seqs in (1, BATCH):
        options = {"enable_prefix_caching": False, "max_num_seqs": max_num_seqs}
        with groups.llm(path, NUM_RANKS, all2all_backend="torch", **options) as llm:
            bits.append([bits_of(result) for result in serve(llm, probes(path), seed=0)])
    assert bits[0] != bits[1]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks(groups: Groups, checkpoints: Checkpoints, num_ranks: int) -> None:
    """Each keeps the promise; between them only fp32's own rounding may differ."""
    path = checkpoints("v3")
    bits = []
    for max_num_seqs, chunk in ((1, 0), (BATCH, 11)):
        options = {"max_num_seqs": max_num_seqs, "long_prefill_token_threshold": chunk, "enable_prefix_caching": False}
        with groups.llm(path, num_ranks, deterministic=True, **options) as llm:
            results = llm.generate(probes(path), PARAMS)
            assert_right(path, results, tolerance=1e-5)
            bits.append([bits_of(result) for result in results])
    assert bits[0] == bits[1]


def test_preempted_and_computed_again(groups: Groups, checkpoints: Checkpoints, alone: Alone) -> None:
    """A cache of 30 blocks: what a preempted request computes again, in other company, is what it had."""
    path = checkpoints("v3")
    small = {"block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 30 * 4 * 4 * 40 * 4}
    with groups.llm(path, NUM_RANKS, deterministic=True, all2all_backend="torch", **small) as llm:
        results = serve(llm, probes(path), seed=9)
        assert sum(rank["num_preemptions"] for rank in settled_stats(llm)) > 0
    assert [bits_of(result) for result in results] == alone.bits("v3", "torch")


def test_transports_agree_to_the_bit(alone: Alone) -> None:
    """Both add up the same partial sums in rank order."""
    assert alone.bits("v3", "torch") == alone.bits("v3", "allgather_reducescatter")


@pytest.mark.parametrize("ubatches", [1, 2])
def test_r018_a_probe_among_random_traffic_has_one_answer(
    groups: Groups, checkpoints: Checkpoints, ubatches: int
) -> None:
    """50 times, beside other requests each time."""
    path = checkpoints("v3")
    probe, draw = probes(path)[6], random.Random(18)
    least = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    found = []
    with groups.llm(path, NUM_RANKS, deterministic=True, ubatch_size=ubatches, **least) as llm:
        for repeat in range(50):
            others = traffic(draw.randrange(12), seed=repeat)
            at = draw.randint(0, len(others))
            results = llm.generate([*others[:at], probe, *others[at:]], PARAMS)
            assert_right(path, [results[at]], tolerance=1e-5)
            found.append(bits_of(results[at]))
        assert all((rank["overlap"]["split"] > 0) == (ubatches > 1) for rank in settled_stats(llm))
    assert all(bits == found[0] for bits in found)


def test_backends_can_be_chosen_one_by_one(groups: Groups, checkpoints: Checkpoints) -> None:
    path = checkpoints("v3")
    with groups.llm(path, NUM_RANKS, attention_backend="tiled", moe_backend="tiled") as llm:
        assert_right(path, llm.generate(probes(path), PARAMS), tolerance=1e-5)
