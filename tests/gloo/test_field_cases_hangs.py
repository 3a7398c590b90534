"""Situations that have hung or stalled systems of this kind, on several ranks. Each test is named by its row."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import more_checkpoints
import pytest
from answers import assert_right, greedy, prompts, settled_stats, steps_of
from gloo_groups import Groups
from overlapped import OFF_FORCED, Mode

from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import RankLost
from hocket.llm import LLM
from hocket.outputs import RequestOutput

Checkpoints = Callable[[str], Path]
WATCHDOG_S = 120.0
STEP_TIMEOUT_S = 5.0
NAMED_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def checkpoints(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Further checkpoints besides those of the whole session."""
    return more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints)


def arrivals(draw: random.Random, mean: float) -> int:
    """How many requests of a Poisson process with this mean arrive in one interval."""
    count, elapsed = 0, draw.expovariate(mean)
    while elapsed < 1.0:
        count += 1
        elapsed += draw.expovariate(mean)
    return count


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_r021_200_requests_that_come_at_random(
    groups: Groups, checkpoints: Checkpoints, num_ranks: int, overlap: Mode
) -> None:
    """Lengths of 1 to 40, arrivals between steps, few blocks: every request ends; a late rank would be named."""
    path, draw = checkpoints("qwen3"), random.Random(num_ranks)
    waiting = [[draw.randrange(3, 512) for _ in range(draw.randint(1, 40))] for _ in range(200)]
    lengths = [draw.randint(1, 40) for _ in waiting]
    done: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + WATCHDOG_S
    options = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 400_000}
    with groups.llm(path, num_ranks, max_model_len=96, **options, **overlap.options) as llm:
        added = 0
        while len(done) < len(waiting):
            assert time.monotonic() < deadline, f"{len(waiting) - len(done)} requests have not ended"
            count = min(arrivals(draw, 8.0), len(waiting) - added)
            batch = range(added, added + count)
            llm.client.add_many([(f"r021-{i}", waiting[i], greedy(lengths[i]), None) for i in batch])
            added += count
            done |= {result.request_id: result for result in llm.client.poll(0.02) if result.finished}
        assert steps_of(llm) > 40
        overlap.check_llm(llm, least=20)
        assert llm.client.num_requests_per_rank() == [0] * num_ranks
        assert [(rank["num_running"], rank["num_waiting"]) for rank in settled_stats(llm)] == [(0, 0)] * num_ranks
    assert [len(done[f"r021-{i}"].outputs[0].token_ids) for i in range(len(waiting))] == lengths
    assert_right(path, [done[f"r021-{i}"] for i in range(0, 200, 20)])


@OFF_FORCED
def test_r024_a_rank_without_work_for_its_whole_life(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("v3")
    with groups.llm(path, 2, **overlap.options) as llm:
        assert_right(path, llm.generate(prompts(path, (9,), num_tokens=12), greedy(12), data_parallel_rank=0))
        busy, idle = settled_stats(llm)
        overlap.check([busy, idle], least=12)
        assert busy["steps"] == idle["steps"] >= 12
        assert (idle["prompt_tokens"], idle["generated_tokens"]) == (0, 0)
        assert idle["phases"] == {"prefill": 0, "decode": 0, "mixed": 0, "idle": idle["steps"]}


def test_r036_many_small_experts(groups: Groups, checkpoints: Checkpoints, overlap: Mode) -> None:
    """64 experts of which 8 are chosen (OLMoE's shape): a short answer takes a few steps and well below 5 seconds."""
    path = checkpoints("qwen3-many-experts")
    given = prompts(path, (8,), num_tokens=8)
    with groups.llm(path, 2, **overlap.options) as llm:
        began = time.monotonic()
        results = llm.generate(given, greedy(8, logprobs=2))
        assert time.monotonic() - began < 5.0
        assert_right(path, results)
        assert steps_of(llm) <= 10
        overlap.check_llm(llm)


@OFF_FORCED
@pytest.mark.parametrize("interval", [1, 4])
def test_r064_a_long_prompt_does_not_stop_a_stream(
    groups: Groups, checkpoints: Checkpoints, interval: int, overlap: Mode
) -> None:
    """While rank 0 decodes, rank 1 computes 400 prompt tokens, 16 in every `interval`-th step and then 100 tokens.

    The stream gets a token in each of its steps, none of which holds more than 16 prompt tokens; the long prompt is
    done after 25 × `interval` steps. Counted in steps: no clock.
    """
    path = checkpoints("qwen3")
    stream, long = prompts(path, (3,))[0], prompts(path, (400,))[0]
    options = {"long_prefill_token_threshold": 16, "prefill_interval": interval, "enable_prefix_caching": False}
    with groups.llm(path, 2, **options, **overlap.options) as llm:
        params = [greedy(220), greedy(100)]
        llm.generate([stream, long], params, data_parallel_rank=[0, 1])
        first, second = (rank["phases"] for rank in settled_stats(llm))
        steps = steps_of(llm)
        overlap.check_llm(llm, least=220)
    assert (first["prefill"], first["decode"], first["mixed"]) == (1, 219, 0)
    assert (second["prefill"], second["decode"], second["mixed"]) == (25, 99, 0)
    # A few steps of slack at the start, where ranks may hear of their prompts at different steps, and one at the end.
    assert 220 <= steps <= 220 + 10 * interval
    if interval == 4:
        assert second["idle"] >= 3 * 24, "three of four steps protected the stream"


@contextmanager
def decoding(path: Path, num_ranks: int, overlap: Mode) -> Iterator[LLM]:
    """Ranks of their own, each in the middle of decoding two long answers."""
    group = RankGroup.start(num_ranks, 120.0)
    options = {"model": str(path), "data_parallel_size": num_ranks, "enable_expert_parallel": True}
    limits = {"skip_tokenizer_init": True, "step_timeout": STEP_TIMEOUT_S, **overlap.options}
    num_requests = 2 * num_ranks
    try:
        with LLM.from_options(Options.from_dict(options | limits), group=group) as llm:
            llm.client.add_many([(f"{i}", [5, 6, 7], greedy(500), i % num_ranks) for i in range(num_requests)])
            counts: dict[str, int] = {}
            while len(counts) < num_requests or min(counts.values()) < 5:
                counts |= {r.request_id: len(r.outputs[0].token_ids) for r in llm.client.poll(20.0)}
            yield llm
    finally:
        group.close()


def poll_for(llm: LLM, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        llm.client.poll(1.0)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_r034_r043_a_rank_is_killed_or_stopped_while_decoding(
    checkpoints: Checkpoints, how: signal.Signals, victim: int, overlap: Mode
) -> None:
    """The error names the rank, comes in time, and no process is left."""
    with decoding(checkpoints("qwen3"), 2, overlap) as llm:
        if overlap.is_on:
            assert min(rank["overlap"]["split"] for rank in llm.client.stats()) >= 5
        pids = list(llm.client.group.pids.values())
        began = time.monotonic()
        os.kill(llm.client.group.pids[victim], how)
        with pytest.raises(RankLost) as caught:
            poll_for(llm, 60.0)
        assert time.monotonic() - began < NAMED_WITHIN_S
        assert re.match(rf"rank {victim}\b", str(caught.value)), caught.value
        assert "\n" not in str(caught.value)
        assert llm.client.group.closed
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
