"""Situations that have broken systems of this kind, on several ranks: right answers. Each test is named by its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import more_checkpoints
import pytest
from answers import assert_right, greedy, ids_of, prompts, reference_logprobs, settled_stats
from checkpoints import hf_reference
from gloo_groups import Groups
from in_process import engine_of, in_process_llm
from more_checkpoints import Tensors, edited
from olmoe import read_config
from overlapped import OFF_DUAL_FORCED, OFF_FORCED, Mode
from patched_ranks import patched_ranks

from hocket.config.model import ModelConfig
from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.llm import LLM
from hocket.moe.layer import MoELayer

Checkpoints = Callable[[str], Path]
TRANSPORTS = ("torch", "allgather_reducescatter")
SIZES = ((33, 0), (0, 33), (7, 1), (1, 17), (64, 1), (64, 64))


@pytest.fixture(scope="module")
def checkpoints(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Further checkpoints besides those of the whole session."""
    return more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints)


def test_r001_a_prefix_written_and_read_in_one_step(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    """Two prompts of one prefix come together, in both orders: one reads what the other writes in the same step.

    The writer is placed first, so that step may be split.
    """
    path = checkpoints("qwen3")
    prefix, a, b = prompts(path, (16, 5, 9))
    with groups.llm(path, 2, block_size=4, enable_prefix_caching=True, **overlap.options) as llm:
        for first, second in ((a, b), (b, a)):
            both = [prefix + first, prefix + second]
            results = llm.generate(both, greedy(6, logprobs=2), data_parallel_rank=0)
            assert_right(path, results)
            assert results[1].num_cached_tokens == 16
            ranks = settled_stats(llm, reset=True)
            phases = ranks[0]["phases"]
            assert (phases["prefill"], phases["decode"]) == (1, 5), "both prompts were computed in the first step"
            overlap.check(ranks, least=6)
            prefix = [(token + 1) % 500 + 3 for token in prefix]  # another one, not yet cached


def test_r007_first_token_logprobs(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("qwen3")
    given = prompts(path, (16, 31, 38, 300))
    found = []
    for num_ranks, options in ((1, {}), (2, overlap.options)):
        with groups.llm(path, num_ranks, **options) as llm:
            results = llm.generate(given, greedy(1, logprobs=1))
            if num_ranks == 2:
                overlap.check(settled_stats(llm), least=1)
        assert_right(path, results)
        found.append(results)
    for one, two in zip(*found, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == pytest.approx(two.outputs[0].cumulative_logprob, abs=1e-4)


def test_r003_lengths_of_all_kinds_together(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("v2")
    given = prompts(path, (1, 2, 3, 5, 8, 13, 21, 34), num_tokens=20)
    with groups.llm(path, 2, **overlap.options) as llm:
        assert_right(path, llm.generate(given, greedy(20, logprobs=2)))
        overlap.check_llm(llm, least=20)


@OFF_FORCED
def test_r015_r016_alone_and_together_on_one_rank_and_on_two(
    groups: Groups, checkpoints: Checkpoints, overlap: Mode
) -> None:
    """One short prompt per rank, five together, each alone: always the same ids."""
    path = checkpoints("qwen3")
    given = prompts(path, (4, 6, 20, 33, 1), num_tokens=12)
    expected = None
    for num_ranks in (1, 2):
        with groups.llm(path, num_ranks, enable_prefix_caching=False) as llm:
            together = ids_of(llm.generate(given, greedy(12)))
            alone = [ids_of(llm.generate([prompt], greedy(12)))[0] for prompt in given]
            pair = ids_of(llm.generate(given[:2], greedy(12), data_parallel_rank=[0, num_ranks - 1]))
            overlap.check_llm(llm, least=6 * 12)
        expected = expected or together
        assert together == alone == expected
        assert pair == expected[:2]
    assert_greedy(path, given, expected or [])


def assert_greedy(path: Path, given: list[list[int]], ids: list[list[int]]) -> None:
    """`ids` are what transformers generates for each prompt."""
    assert ids == [hf_reference(path).greedy(prompt, len(found)) for prompt, found in zip(given, ids, strict=True)]


@OFF_DUAL_FORCED
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_r025_r027_r040_r042_r060_uneven_ranks(
    groups: Groups, checkpoints: Checkpoints, transport: str, overlap: Mode
) -> None:
    """Ranks with very different numbers of tokens, none among them, take the same steps and answer right."""
    path = checkpoints("v3")
    of_size = dict(zip((1, 7, 17, 33, 64), prompts(path, (1, 7, 17, 33, 64), num_tokens=4), strict=True))
    options = {"all2all_backend": transport, "enable_prefix_caching": False, **overlap.options}
    with groups.llm(path, 2, **options) as llm:
        for sizes in SIZES:
            pinned = [(of_size[size], rank) for rank, size in enumerate(sizes) if size]
            given, ranks = [list(values) for values in zip(*pinned, strict=True)]
            assert_right(path, llm.generate(given, greedy(4, logprobs=2), data_parallel_rank=ranks))
            ranks = settled_stats(llm, reset=True)
            assert [rank["prompt_tokens"] for rank in ranks] == list(sizes)
            assert ranks[0]["steps"] == ranks[1]["steps"] >= 4
            first_is_split = overlap.name == "dual" and 1 not in sizes
            overlap.check(ranks, least=4 if overlap.name == "forced" else int(first_is_split))


@OFF_DUAL_FORCED
def test_r046_a_full_step_beside_an_idle_rank(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    """Split, and where a threshold forbids it: buffers hold the whole step then."""
    path = checkpoints("qwen3")
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 4, **overlap.options}
    for transport in TRANSPORTS:
        for threshold in (64, 65) if overlap.is_on else (512,):
            options = limits | {"all2all_backend": transport, "dbo_prefill_token_threshold": threshold}
            with groups.llm(path, 2, **options) as llm:
                assert_right(path, llm.generate(prompts(path, (64,)), greedy(3), data_parallel_rank=1))
                found = overlap.check_llm(llm, least=0)
            if overlap.name == "dual":
                assert (found["split"], found["below_threshold"]) == ((1, 2) if threshold == 64 else (0, 3))


def test_r057_one_prompt_of_64_tokens_per_rank(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    """Split inside the request."""
    path = checkpoints("qwen3")
    with groups.llm(path, 2, **overlap.options) as llm:
        results = llm.generate(prompts(path, (64, 64), num_tokens=8), greedy(8, logprobs=4), data_parallel_rank=[0, 1])
        assert_right(path, results)
        ranks = settled_stats(llm)
        assert [rank["prompt_tokens"] for rank in ranks] == [64, 64]
        overlap.check(ranks)
        assert all(rank["overlap"]["ubatch_tokens"] == ({"32+32": 1} if overlap.is_on else {}) for rank in ranks)


@pytest.fixture(scope="module")
def one_sided(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose correction bias sends every token to the first half of the experts."""

    def bias(tensors: Tensors) -> None:
        for name, value in tensors.items():
            if name.endswith("e_score_correction_bias"):
                value[: len(value) // 2] += 100

    return edited(checkpoints("v3"), tmp_path_factory.mktemp("one-sided") / "v3", bias)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_r061_a_rank_whose_experts_get_nothing(groups: Groups, one_sided: Path, transport: str, overlap: Mode) -> None:
    given = prompts(one_sided, (3, 40, 17, 1), num_tokens=6)
    with in_process_llm(one_sided) as llm:
        layers = [m for m in engine_of(llm).runner.model.modules() if isinstance(m, MoELayer)]
        for layer in layers:
            layer.count_expert_load()
        llm.generate(given, greedy(6))
        assert not any(bool(layer.expert_load[8:].any()) for layer in layers if layer.expert_load is not None)
    with groups.llm(one_sided, 2, all2all_backend=transport, **overlap.options) as llm:
        assert_right(one_sided, llm.generate(given, greedy(6, logprobs=2)))
        overlap.check_llm(llm, least=6)


@pytest.mark.parametrize(("model", "num_ranks"), [("qwen3", 3), ("qwen3-two-experts", 4)])
def test_r063_experts_that_do_not_divide_evenly(
    groups: Groups, checkpoints: Checkpoints, model: str, num_ranks: int, overlap: Mode
) -> None:
    """8 experts on 3 ranks; 2 experts on 4 ranks, so that two ranks have none."""
    path = checkpoints(model)
    given = prompts(path, (5, 2, 18, 40, 9), num_tokens=6)
    for transport in TRANSPORTS:
        with groups.llm(path, num_ranks, all2all_backend=transport, **overlap.options) as llm:
            assert_right(path, llm.generate(given, greedy(6, logprobs=2)))
            overlap.check_llm(llm)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_r067_requests_that_come_at_once_are_spread(
    groups: Groups, checkpoints: Checkpoints, num_ranks: int, overlap: Mode
) -> None:
    path = checkpoints("qwen3")
    with groups.llm(path, num_ranks, **overlap.options) as llm:
        given = [[3 + i, 7, 9 + i][: 1 + i % 3] for i in range(64)]
        llm.client.add_many([(f"r067-{i}", prompt, greedy(4), None) for i, prompt in enumerate(given)])
        waiting = llm.client.num_requests_per_rank()
        assert sum(waiting) == 64
        assert max(waiting) - min(waiting) <= 2
        while llm.client.has_unfinished:
            llm.client.poll(20.0)
        ranks = settled_stats(llm)
        assert [rank["requests_finished"]["length"] for rank in ranks] == waiting
        overlap.check(ranks, least=4)


def test_r094_first_layer_dense(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("qwen3-first-dense")
    assert ModelConfig.from_pretrained(path).moe.layers == (False, True, True, True)
    with groups.llm(path, 2, **overlap.options) as llm:
        assert_right(path, llm.generate(prompts(path, (2, 30), num_tokens=6), greedy(6, logprobs=2)))
        overlap.check_llm(llm)


@pytest.fixture(scope="module")
def bare_ranks() -> Iterator[RankGroup]:
    """Two ranks that can import no optional package, and know one model more."""
    with patched_ranks(2, "olmoe:register_without_optional_packages") as group:
        yield group


def wide(path: Path, **options: Any) -> Options:
    given = {"model": str(path), "skip_tokenizer_init": True, "data_parallel_size": 2, "enable_expert_parallel": True}
    return Options.from_dict(given | options)


def test_r096_a_new_model_needs_no_parallel_code(
    checkpoints: Checkpoints, bare_ranks: RankGroup, monkeypatch: pytest.MonkeyPatch, overlap: Mode
) -> None:
    """A model that knows only its attention runs on ranks that share its experts, split and unsplit."""
    path = checkpoints("olmoe")
    monkeypatch.setattr(ModelConfig, "from_pretrained", read_config)
    given = prompts(path, (3, 40, 17, 1), num_tokens=8)  # two on each rank
    for transport in TRANSPORTS:
        with LLM.from_options(wide(path, all2all_backend=transport, **overlap.options), group=bare_ranks) as llm:
            assert llm.config.parallel.expert_parallel_size == 2
            assert_right(path, llm.generate(given, greedy(8, logprobs=4)))
            overlap.check_llm(llm, least=8)


def test_r100_r133_without_any_optional_package(checkpoints: Checkpoints, bare_ranks: RankGroup) -> None:
    path = checkpoints("v2")
    with LLM.from_options(wide(path, moe_backend="reference"), group=bare_ranks) as llm:
        assert_right(path, llm.generate(prompts(path, (2, 30), num_tokens=6), greedy(6, logprobs=2)))


def test_r109_replicas_without_shared_experts(groups: Groups, checkpoints: Checkpoints) -> None:
    """Fewer expert-parallel ranks than ranks: here one, each rank being a replica."""
    path = checkpoints("v2")
    with groups.llm(path, 2, enable_expert_parallel=False) as llm:
        assert llm.config.parallel.expert_parallel_size == 1
        assert_right(path, llm.generate(prompts(path, (2, 30, 8), num_tokens=6), greedy(6, logprobs=2)))


def test_r112_counters_belong_to_their_own_batch(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("qwen3")
    with groups.llm(path, 2, enable_prefix_caching=False, **overlap.options) as llm:
        first, second = llm.generate([[5] * 11, [6] * 23], [greedy(3), greedy(9)], data_parallel_rank=[1, 0])
        ranks = settled_stats(llm)
    overlap.check(ranks)
    assert [rank["prompt_tokens"] for rank in ranks] == [23, 11]
    assert [rank["generated_tokens"] for rank in ranks] == [9, 3]
    assert [rank["phases"]["prefill"] for rank in ranks] == [1, 1]
    assert [rank["phases"]["decode"] for rank in ranks] == [8, 2]
    assert [first.prompt_token_ids, second.prompt_token_ids] == [[5] * 11, [6] * 23]
    assert [len(first.outputs[0].token_ids), len(second.outputs[0].token_ids)] == [3, 9]


def test_r121_an_abort_frees_its_blocks_and_changes_no_answer(
    groups: Groups, checkpoints: Checkpoints, overlap: Mode
) -> None:
    """What one rank has right after the abort is seen before its next step: messages keep their order."""
    path, num_tokens = checkpoints("v3"), 300  # far more than are generated while this test looks on
    given = prompts(path, (20, 21, 22, 23), num_tokens=4)
    with groups.llm(path, 2, block_size=8, enable_prefix_caching=False, **overlap.options) as llm:
        client = llm.client
        client.add_many([(f"r121-{i}", p, greedy(num_tokens), i % 2) for i, p in enumerate(given)])
        results = {}
        while len(results) < 4 or min(len(r.outputs[0].token_ids) for r in results.values()) < 5:
            results |= {result.request_id: result for result in client.poll(20.0)}
        before = client.stats()
        client.abort(["r121-1"])
        after = client.stats()
        assert [rank["num_running"] for rank in before] == [2, 2]
        assert [rank["num_running"] for rank in after] == [2, 1]
        while client.has_unfinished:
            client.poll(20.0)
        assert [rank["num_running"] for rank in client.stats()] == [0, 0]
        assert [rank["kv_usage"] for rank in client.stats()] == [0.0, 0.0]
        assert client.stats()[1]["requests_finished"] == {"abort": 1, "length": 1}
        overlap.check_llm(llm, least=5)
    assert results["r121-1"].outputs[0].finish_reason == "abort"
    assert len(results["r121-1"].outputs[0].token_ids) < num_tokens
    rest = [results[f"r121-{i}"] for i in (0, 2, 3)]
    assert [len(ids) for ids in ids_of(rest)] == [num_tokens] * 3
    assert_right(path, rest)


def test_r132_the_same_file_on_one_rank_and_on_two(groups: Groups, checkpoints: Checkpoints) -> None:
    """All log-probabilities of the first tokens agree between one rank, two ranks and transformers."""
    path = checkpoints("v3")
    given = prompts(path, (12, 40), num_tokens=2)
    tables = []
    for num_ranks in (1, 2):
        with groups.llm(path, num_ranks, enable_prefix_caching=False) as llm:
            results = llm.generate(given, greedy(2, logprobs=-1))
        assert_right(path, results, tolerance=1e-5)
        tables.append([position for result in results for position in result.outputs[0].logprobs or ()])
    assert len(tables[0]) == 4
    for one, two in zip(*tables, strict=True):
        assert len(one) == len(two) == reference_logprobs(path, tuple(given[0] + [3])).shape[1]
        assert max(abs(one[token].logprob - two[token].logprob) for token in one) < 1e-5
