"""Situations that have broken dual batch overlap elsewhere, on several ranks. Each test is named by its row.

Rows that are no different with overlap run both ways in `test_field_cases.py` and `test_field_cases_hangs.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import more_checkpoints
import pytest
import torch
from answers import assert_right, expert_load, greedy, ids_of, prompts, settled_stats
from expert_load import LOAD_FOLDER
from gloo_groups import Groups
from olmoe import read_config
from overlapped import OFF_DUAL_FORCED, Mode, mode
from patched_ranks import patched_ranks
from sharing import CARRY

from hocket.config.model import ModelConfig
from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.llm import LLM
from hocket.outputs import RequestOutput

Checkpoints = Callable[[str], Path]
SIZES = (
    (1, 1), (1, 0), (0, 1), (2, 1), (2, 2), (8, 1), (1, 8), (0, 8), (8, 8), (64, 1), (33, 0), (1, 17),
    (7, 7), (7, 9), (8, 9), (9, 9), (15, 16), (16, 17),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Further checkpoints besides those of the whole session."""
    return more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints)


def wide_llm(path: Path, group: RankGroup, **options: Any) -> LLM:
    """An LLM on the ranks of `group`."""
    given = {"model": str(path), "skip_tokenizer_init": True, "step_timeout": 20.0}
    shared = {"data_parallel_size": group.world_size, "enable_expert_parallel": True}
    return LLM.from_options(Options.from_dict(given | shared | options), group=group)


@pytest.mark.parametrize("overlap", ["dual", "forced"], indirect=True)
def test_r001_a_reader_before_its_writer_is_left_unsplit(checkpoints: Checkpoints, overlap: Mode) -> None:
    """Batches in reverse, so that the reader would be in ubatch 0 and its writer in ubatch 1."""
    path = checkpoints("qwen3")
    prefix, other, a, b = prompts(path, (16, 16, 5, 9))
    with (
        patched_ranks(2, "reversed_batches:install") as group,
        wide_llm(path, group, block_size=4, **overlap.options) as llm,
    ):
        for first, second in ((a, b), (b, a)):
            results = llm.generate([prefix + first, prefix + second], greedy(6, logprobs=2), data_parallel_rank=0)
            assert_right(path, results)
            assert results[1].num_cached_tokens == 16
            ranks = settled_stats(llm, reset=True)
            found = overlap.check(ranks, least=5)
            assert ranks[0]["overlap"]["reasons"]["prefill"] == {"prefix_hazard": 1}
            assert found["prefix_hazard"] == 1
            prefix = other
        # The prefix is cached now: nobody writes what the other one reads.
        results = llm.generate([other + a[1:], other + b[1:]], greedy(2), data_parallel_rank=0)
        assert_right(path, results)
        assert settled_stats(llm)[0]["overlap"]["reasons"]["prefill"] == {"split": 1}


def halves(sizes: tuple[int, int], rank: int) -> str:
    """How a rank's tokens lie in two ubatches that are cut at half the larger rank's."""
    cut = max(sizes) // 2
    first = min(sizes[rank], cut)
    return f"{first}+{sizes[rank] - first}"


@pytest.mark.parametrize("threshold", [2, 8, "forced"])
def test_r030_r031_r040_r055_r060_r136_every_size_is_cut_or_left_as_the_threshold_says(
    groups: Groups, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, threshold: int | str
) -> None:
    """One step of prefill per pair of sizes: right answers, its reason, and each rank's tokens per ubatch."""
    path = checkpoints("v2")
    overlap = mode("forced" if threshold == "forced" else "dual", monkeypatch)
    options = {**overlap.options, "enable_prefix_caching": False}
    if overlap.name == "dual":
        options |= {"dbo_decode_token_threshold": threshold, "dbo_prefill_token_threshold": threshold}
    of_size = {size: prompts(path, (size,))[0] for size in {size for sizes in SIZES for size in sizes if size}}
    expected_reasons: Counter[str] = Counter()
    expected_sizes: list[Counter[str]] = [Counter(), Counter()]
    with groups.llm(path, 2, **options) as llm:
        for sizes in SIZES:
            working = [rank for rank in range(2) if sizes[rank]]
            given = [of_size[sizes[rank]] for rank in working]
            assert_right(path, llm.generate(given, greedy(1, logprobs=2), data_parallel_rank=working))
            least = min(sizes[rank] for rank in working)
            reason = "split" if threshold == "forced" or least >= int(threshold) else "below_threshold"
            expected_reasons[reason] += 1
            if reason == "split":
                for rank in range(2):
                    expected_sizes[rank][halves(sizes, rank)] += 1
        ranks = settled_stats(llm)
    found = overlap.check(ranks)
    del found["no_work"]
    assert found == expected_reasons
    assert [Counter(rank["overlap"]["ubatch_tokens"]) for rank in ranks] == expected_sizes
    assert [rank["phases"]["prefill"] for rank in ranks] == [sum(s[rank] > 0 for s in SIZES) for rank in range(2)]


def test_r058_halves_differ_by_one_token_at_most(
    groups: Groups, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of 70, 76 and 24 tokens, and of 71: cut inside the second one."""
    path = checkpoints("qwen3")
    overlap = mode("forced", monkeypatch)
    with groups.llm(path, 1, enable_prefix_caching=False) as llm:
        for lengths, sizes in (((70, 76, 24), "85+85"), ((71, 76, 24), "85+86")):
            results = llm.generate(prompts(path, lengths, num_tokens=4), greedy(4, logprobs=2))
            assert_right(path, results)
            ranks = settled_stats(llm, reset=True)
            overlap.check(ranks, least=4)
            assert ranks[0]["overlap"]["ubatch_tokens"] == {sizes: 1, "1+2": 3}


@OFF_DUAL_FORCED
@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
def test_r073_expert_load_is_counted_once(
    checkpoints: Checkpoints, tmp_path: Path, overlap: Mode, transport: str
) -> None:
    """What all ranks count together is what transformers' routers choose: not twice, and no padding or dummies."""
    path = checkpoints("v3")
    given = prompts(path, (5, 40, 17), num_tokens=6)
    with patched_ranks(2, "expert_load:install", **{LOAD_FOLDER: str(tmp_path)}) as group:
        with wide_llm(path, group, enable_prefix_caching=False, all2all_backend=transport, **overlap.options) as llm:
            results = llm.generate(given, greedy(6), data_parallel_rank=[0, 1, 1])
            overlap.check_llm(llm)
        assert_right(path, results)
    counted = sum(torch.load(tmp_path / str(rank)) for rank in range(2))
    assert [row.tolist() for row in counted] == [total.tolist() for total in expert_load(path, results)]


def test_r078_a_prompt_over_the_steps_limit_is_chunked_and_split(
    groups: Groups, checkpoints: Checkpoints, overlap: Mode
) -> None:
    path = checkpoints("v2")
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_prefix_caching": False}
    with groups.llm(path, 2, **limits, **overlap.options) as llm:
        results = llm.generate(prompts(path, (130, 200), num_tokens=4), greedy(4, logprobs=2))
        assert_right(path, results)
        ranks = settled_stats(llm)
    overlap.check(ranks, least=3)
    for rank in ranks:
        assert all(sum(map(int, key.split("+"))) <= 48 for key in rank["overlap"]["ubatch_tokens"])


def test_r087_prefill_above_the_default_threshold_is_split(groups: Groups, checkpoints: Checkpoints) -> None:
    path = checkpoints("qwen3")
    with groups.llm(path, 2, enable_dbo=True) as llm:
        given = prompts(path, (300, 260, 290, 301))
        assert_right(path, llm.generate(given, greedy(2), data_parallel_rank=[0, 0, 1, 1]))
        found = settled_stats(llm)
    assert [rank["overlap"]["reasons"]["prefill"] for rank in found] == [{"split": 1}] * 2
    assert [rank["overlap"]["reasons"]["decode"] for rank in found] == [{"below_threshold": 1}] * 2


@pytest.fixture(params=["per-ubatch", "global"], scope="module")
def sharing_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, RankGroup]]:
    """Ranks whose "olmoe" uses one scratch buffer in all layers, and what the layer before left in it."""
    with patched_ranks(2, "sharing:register", **{CARRY: request.param}) as group:
        yield request.param, group


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
def test_r006_r093_layers_that_share_a_buffer(
    checkpoints: Checkpoints,
    sharing_ranks: tuple[str, RankGroup],
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
) -> None:
    """Kept in a `PerUBatch` it is each ubatch's own; one buffer for all, the control, gives wrong answers."""
    kept, group = sharing_ranks
    path = checkpoints("olmoe")
    monkeypatch.setattr(ModelConfig, "from_pretrained", read_config)
    given = [[(7 * i + 13 * length) % 500 + 3 for i in range(length)] for length in (3, 40, 17, 11)]

    def answer(overlap: Mode) -> list[RequestOutput]:
        options = {"ubatch_executor": executor, "enable_prefix_caching": False, **overlap.options}
        with wide_llm(path, group, **options) as llm:
            results = llm.generate(given, greedy(8, logprobs=1))
            overlap.check_llm(llm, least=8)
        return results

    off = answer(mode("off", monkeypatch))
    for name in ("dual", "forced"):
        on = answer(mode(name, monkeypatch))
        pairs = list(zip(on, off, strict=True))
        distance = max(
            abs((a.outputs[0].cumulative_logprob or 0.0) - (b.outputs[0].cumulative_logprob or 0.0)) for a, b in pairs
        )
        if kept == "per-ubatch":
            assert ids_of(on) == ids_of(off)
            assert distance < 1e-4
        else:
            assert ids_of(on) != ids_of(off), "the buffer was not shared, or nobody read it"
