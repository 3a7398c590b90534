"""The offline front door: replicas, idle ranks, counters, chat, defaults, errors that leave it usable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gloo_groups import Groups

from hocket.errors import CapacityError, ConfigError, HocketError
from hocket.llm import LLM
from hocket.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9], [10] * 20, [3]]


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_replicas_give_the_same_and_do_not_wait_for_each_other(
    groups: Groups, checkpoints: Callable[..., Path]
) -> None:
    model = checkpoints("v2")
    with groups.llm(model, 1) as llm:
        expected = tokens(llm)
    with groups.llm(model, 2, enable_expert_parallel=False) as llm:
        assert tokens(llm) == expected
        llm.stats(reset=True)
        llm.generate([[4, 5]], GREEDY, data_parallel_rank=1)
        assert [rank["steps"] for rank in llm.stats()] == [0, 8]


def test_idle_ranks_sleep_and_wake_together(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    with groups.llm(checkpoints("v2"), 3) as llm:
        for turn in range(3):
            llm.stats(reset=True)
            llm.generate([[4, 5, 6]], GREEDY, data_parallel_rank=turn)
            stats = settled(llm)
            assert len({rank["steps"] for rank in stats}) == 1
            assert stats[turn]["generated_tokens"] == 8
            assert sum(rank["generated_tokens"] for rank in stats) == 8
            assert stats[(turn + 1) % 3]["phases"]["idle"] >= 8


def settled(llm: LLM) -> list[dict]:
    """Counters once they no longer change: ranks asleep. Fails if they go on stepping without work."""
    deadline = time.monotonic() + 20
    last = llm.stats()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = llm.stats()
        if now == last:
            return now
        last = now
    raise AssertionError("ranks step on without work")


def test_counters_add_up(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    with groups.llm(checkpoints("qwen3"), 2, max_num_batched_tokens=16) as llm:
        llm.stats(reset=True)
        tokens(llm)
        for rank in settled(llm):
            assert sum(rank["phases"].values()) == rank["steps"]
            reasons = rank["overlap"]["reasons"]
            assert sum(count for by_reason in reasons.values() for count in by_reason.values()) == rank["steps"]
            assert {name for by_reason in reasons.values() for name in by_reason} == {"disabled"}
            assert rank["overlap"]["split"] == 0
            assert rank["kv_usage"] == 0.0
        assert sum(rank["prompt_tokens"] for rank in llm.stats()) == sum(map(len, PROMPTS))
        assert sum(rank["generated_tokens"] for rank in llm.stats()) == 32
        assert sum(rank["requests_finished"]["length"] for rank in llm.stats()) == 4


def test_wrong_prompts_start_nothing_and_leave_it_usable(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    with groups.llm(checkpoints("v2"), 2, max_model_len=64) as llm:
        expected = tokens(llm)
        wrong = [
            ([[1, 2], []], ConfigError, "at least one token"),
            ([[1, 2], [512]], ConfigError, "below 512"),
            ([[1, 2], [3] * 64], CapacityError, "max_model_len 64"),
            ([[1, 2], "text"], ConfigError, "skip_tokenizer_init"),
        ]
        for prompts, error, words in wrong:
            with pytest.raises(error, match=words):
                llm.generate(prompts, GREEDY)
        with pytest.raises(ConfigError, match="0 to 1"):
            llm.generate([[1]], GREEDY, data_parallel_rank=2)
        with pytest.raises(ConfigError, match="one per prompt"):
            llm.generate([[1], [2]], [GREEDY])
        assert llm.client.num_requests_per_rank() == [0, 0]
        assert tokens(llm) == expected


def test_a_closed_llm_says_so(checkpoints: Callable[..., Path]) -> None:
    llm = LLM(str(checkpoints("v2")), skip_tokenizer_init=True)
    llm.close()
    with pytest.raises(HocketError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_seeds_and_n(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=6, ignore_eos=True)
    runs = []
    for ranks in (1, 2):
        with groups.llm(checkpoints("v2"), ranks) as llm:
            for _ in range(2):
                (output,) = llm.generate([[5, 6, 7]], params)
                assert [completion.index for completion in output.outputs] == [0, 1, 2]
                runs.append([completion.token_ids for completion in output.outputs])
    assert all(run == runs[0] for run in runs)
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_prompt_logprobs_whatever_the_chunks_and_the_cache(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3, logprobs=-1)
    prompt = list(range(3, 43))
    found = []
    for options in ({}, {"long_prefill_token_threshold": 7}, {"enable_prefix_caching": False}):
        with groups.llm(checkpoints("v3"), 2, block_size=4, **options) as llm:
            for _ in range(2):  # the second time the prompt is in the cache
                (output,) = llm.generate([prompt], params)
                assert output.prompt_logprobs is not None
                assert output.prompt_logprobs[0] is None
                assert len(output.prompt_logprobs) == len(prompt)
                assert output.outputs[0].logprobs is not None
                assert len(output.outputs[0].logprobs[0]) == 512
                found.append(
                    [
                        position[token].logprob
                        for position, token in zip(  # type: ignore[index]
                            output.prompt_logprobs[1:], prompt[1:], strict=True
                        )
                    ]
                )
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)


def test_preemption_changes_nothing(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[20 + i] * 10 for i in range(8)]
    with groups.llm(checkpoints("v2"), 2, max_model_len=64) as llm:
        expected = tokens(llm, prompts, params)
        bytes_per_block = llm.ranks[0]["cache_bytes"] // llm.ranks[0]["num_blocks"]
    with groups.llm(
        checkpoints("v2"), 2, max_model_len=64, kv_cache_memory_bytes=7 * bytes_per_block, enable_prefix_caching=False
    ) as llm:
        assert tokens(llm, prompts, params) == expected
        assert sum(rank["num_preemptions"] for rank in llm.stats()) > 0


def test_chat_and_defaults_of_the_shipped_model(groups: Groups) -> None:
    with groups.llm("tiny", 2, skip_tokenizer_init=False) as llm:
        tokenizer = llm.get_tokenizer()
        chat = [{"role": "user", "content": "Who was Emma?"}]
        (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=5))
        assert "Who was Emma?" in str(output.prompt)
        assert output.prompt_token_ids == tokenizer.encode(str(output.prompt), add_special_tokens=False)
        (text,) = llm.generate("In the beginning", SamplingParams(temperature=0, max_tokens=5))
        assert text.prompt_token_ids[0] == tokenizer.bos_token_id
        assert text.outputs[0].text
        defaults = json.loads((Path(llm.config.model_path) / "generation_config.json").read_text())
        assert llm.get_default_sampling_params().temperature == defaults.get("temperature", 1.0)
