"""Metrics of real ranks: a series for each, sums that are what was sent and what ran, also while ranks work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import greedy
from gloo_groups import Groups
from metrics_text import Shown

from hocket.llm import LLM
from hocket.metrics.show import Metrics
from hocket.worker.expert_load import EVERY

Checkpoints = Callable[[str], Path]
ON = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}


def observed(llm: LLM) -> Metrics:
    metrics = llm.client.listener = Metrics(llm.config, "test")
    return metrics


def scraped(llm: LLM, metrics: Metrics) -> Shown:
    """As a server's loop does it, which goes on polling meanwhile."""

    async def both() -> bytes:
        scrape = asyncio.create_task(metrics.scrape(llm.client.ask_counters, 20.0))
        while not scrape.done():
            llm.client.poll(0.02)
            await asyncio.sleep(0)
        return await scrape

    return Shown(asyncio.run(both()))


def settled(llm: LLM, metrics: Metrics) -> Shown:
    """Once all ranks sleep, so that they have counted the step that found no work."""
    shown = scraped(llm, metrics)
    while (again := scraped(llm, metrics)).samples != shown.samples:
        shown = again
    return shown


def test_r111_a_series_for_each_rank_and_their_sum_is_what_was_sent(groups: Groups, checkpoints: Checkpoints) -> None:
    with groups.llm(checkpoints("v2"), 2, **ON, block_size=4) as llm:
        metrics = observed(llm)
        before = settled(llm, metrics)
        assert before.by_engine("hocket:request_success_total") == {"0": 0, "1": 0}, "they are there from the start"
        ranks = [0, 0, 0, 1, 1]
        prompts = [[5 + i, 6, 7, 8, 9 + i, 10] for i in range(5)]
        llm.generate(prompts, greedy(8), data_parallel_rank=ranks)
        llm.generate(prompts[:1], greedy(8, n=1), data_parallel_rank=[0])  # found in the cache: a block of 4
        shown = settled(llm, metrics)
        llm.client.add_many([(f"dropped-{i}", prompts[i], greedy(50), 1) for i in range(2)])
        llm.client.poll(20.0)
        llm.client.abort(["dropped-0", "dropped-1"])
        after = settled(llm, metrics)
    assert shown.by_engine("hocket:request_success_total") == {"0": 4, "1": 2}
    assert after.by_engine("hocket:request_success_total", finished_reason="abort") == {"0": 0, "1": 2}
    assert after.by_engine("hocket:request_success_total", finished_reason="length") == {"0": 4, "1": 2}
    sent = {"prompt_tokens_total": 6, "generation_tokens_total": 8, "e2e_request_latency_seconds_count": 1}
    sent |= {"time_to_first_token_seconds_count": 1, "inter_token_latency_seconds_count": 7}
    for name, each in sent.items():
        assert shown.by_engine(f"hocket:{name}") == {"0": 4 * each, "1": 2 * each}, name
    computed = shown.by_engine("hocket:computed_prompt_tokens_total")
    hits = shown.by_engine("hocket:prefix_cache_hits_total")
    assert hits == {"0": 4, "1": 0}
    assert computed == {"0": 4 * 6 - 4, "1": 2 * 6}
    assert shown.by_engine("hocket:prefix_cache_queries_total") == {"0": 24, "1": 12}
    for engine in ("0", "1"):
        times = {
            name: shown.by_engine(f"hocket:request_{name}_time_seconds_sum")[engine]
            for name in ("queue", "prefill", "decode", "inference")
        }
        assert all(seconds > 0 for seconds in times.values()), times
        assert times["prefill"] + times["decode"] == pytest.approx(times["inference"])
        first = shown.by_engine("hocket:time_to_first_token_seconds_sum")[engine]
        assert times["queue"] + times["prefill"] == pytest.approx(first)
        whole = shown.by_engine("hocket:e2e_request_latency_seconds_sum")[engine]
        assert times["queue"] + times["inference"] <= whole


def test_r136_steps_by_phase_and_reason_add_up(groups: Groups, checkpoints: Checkpoints) -> None:
    """Decodes of (8, 8), (8, 1), (1, 1) and (0, 8) requests, their prefills with them."""
    with groups.llm(checkpoints("v2"), 2, **ON) as llm:
        metrics = observed(llm)
        for first, second in ((8, 8), (8, 1), (1, 1), (0, 8)):
            prompts = [[5 + i, 6, 7, 8 + i] for i in range(first + second)]
            llm.generate(prompts, greedy(3), data_parallel_rank=[0] * first + [1] * second)
        shown = settled(llm, metrics)
        ranks = llm.stats()
    steps = shown.values("hocket:overlap_steps_total")
    for engine, rank in enumerate(ranks):
        mine = {labels[1:]: count for labels, count in steps.items() if labels[0] == str(engine)}
        assert sum(mine.values()) == rank["steps"]
        assert shown.by_engine("hocket:steps_total")[str(engine)] == rank["steps"]
        split = sum(count for (_, reason), count in mine.items() if reason == "split")
        assert shown.by_engine("hocket:ubatch_tokens_count")[str(engine)] == 2 * split > 0
        assert {reason for _, reason in mine} == {"split", "below_threshold", "no_work"}
        assert mine["decode", "below_threshold"] == 4, "(8, 1) and (1, 1), two decodes each"
    # The last decodes of rank 0 were (1, 1); rank 1's were (0, 8).
    active = shown.values("hocket:overlap_active")
    assert (active["0", "decode"], active["1", "decode"], active["0", "idle"]) == (0, 1, 1)
    tokens = shown.by_engine("hocket:ubatch_tokens_sum")
    assert tokens == {"0": 8 * 4 + 8 * 2 + 8 * 4 + 4, "1": 8 * 4 + 8 * 2 + 4 + 4 + 8 * 4 + 8 * 2}


def test_where_time_goes_is_what_the_ranks_say(groups: Groups) -> None:
    """Over an emulated link: both kinds of transfers, exposed or not, and hand-overs; all of it inside the steps."""
    link = {"emulate_link_gb_per_s": 1.0, "emulate_link_latency_us": 2000.0}
    with groups.llm("tiny", 2, **ON, **link) as llm:
        metrics = observed(llm)
        llm.generate([[5 + i, 6, 7, 8 + i] for i in range(8)], greedy(4))
        shown = settled(llm, metrics)
        ranks = llm.stats()
    parts = shown.values("hocket:step_seconds_total")
    comm = shown.values("hocket:comm_seconds_total")
    for engine, rank in zip(("0", "1"), ranks, strict=True):
        forward = parts[engine, "forward"]
        assert forward == pytest.approx(rank["times_us"]["forward"]["sum"] / 1e6)
        for kind in ("dispatch", "combine"):
            assert comm[engine, "true", kind] > 0
            assert comm[engine, "false", kind] > 0
        exposed = comm[engine, "true", "dispatch"] + comm[engine, "true", "combine"]
        assert exposed < forward
        hand_over = shown.by_engine("hocket:handover_seconds_total")[engine]
        assert 0 < hand_over < forward
        sent = shown.by_engine("hocket:comm_bytes_total")[engine]
        assert sent == rank["overlap"]["comm_bytes"] > 0


def test_ranks_answer_while_they_work_and_no_result_is_lost(groups: Groups, checkpoints: Checkpoints) -> None:
    with groups.llm(checkpoints("v2"), 2, **ON) as llm:
        metrics = observed(llm)
        prompts = [[5 + i, 6, 7, 8 + i] for i in range(6)]
        expected = [result.outputs[0].token_ids for result in llm.generate(prompts, greedy(40))]
        llm.client.add_many([(str(100 + i), prompt, greedy(40), i % 2) for i, prompt in enumerate(prompts)])
        results, most_running = {}, 0.0
        while llm.client.has_unfinished:
            llm.client.ask_counters()
            results |= {result.request_id: result for result in llm.client.poll(20.0)}
            running = Shown(metrics.render()).by_engine("hocket:num_requests_running")
            most_running = max(most_running, *running.values(), 0)
        assert [results[str(100 + i)].outputs[0].token_ids for i in range(6)] == expected
    assert most_running == 3


def test_the_load_of_experts_is_sampled_once_it_is_asked_for(groups: Groups, checkpoints: Checkpoints) -> None:
    """Its mean is what each step's tokens choose: one request on each rank decodes, top-k choices a layer each."""
    with groups.llm(checkpoints("qwen3"), 2, **ON) as llm:
        metrics = observed(llm)
        prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
        llm.generate(prompts, greedy(2 * EVERY + 8))  # so that the next prompts are not in a step that is counted
        assert not scraped(llm, metrics).values("hocket:expert_load"), "nothing was counted before"
        llm.generate(prompts, greedy(4 * EVERY), data_parallel_rank=[0, 1])
        shown = settled(llm, metrics)
        experts, top_k = llm.config.model.moe.num_experts, llm.config.model.moe.top_k
        num_layers = sum(llm.config.model.moe.layers)
    mean = shown.values("hocket:expert_load", engine="all", stat="mean")
    assert len(mean) == num_layers
    for value in mean.values():
        assert value * experts == pytest.approx(2 * top_k, rel=0.01), "decodes of two tokens"
    most = shown.values("hocket:expert_load", engine="all", stat="max")
    assert all(most[layer] > mean[layer] for layer in mean)
    skews = shown.values("hocket:rank_load_skew", engine="all")
    assert all(1 <= skew <= 2 for skew in skews.values())
