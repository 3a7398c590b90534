"""Scheduling rules, one by one: budgets, chunks, order, stops, refusals, prefix hits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from scheduling import EOS, PLAIN, STOP, commit, make_request, make_scheduler, rows, step

from hocket.errors import CapacityError, ConfigError
from hocket.request import EngineRequest, Request, RequestStatus, SamplingParams


def test_prompts_are_chunked_and_mixed_with_decodes() -> None:
    scheduler = make_scheduler()
    for name, num_tokens in (("a", 5), ("b", 20), ("c", 3)):
        scheduler.add(make_request(name, num_tokens))
    assert scheduler.num_waiting == 3
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 0, 5), ("b", 0, 11)]
    assert [row.needs_sample for row in batch.requests] == [True, False]
    assert (batch.phase, batch.num_tokens, batch.num_prefill_tokens) == ("prefill", 16, 16)
    assert commit(scheduler, batch) == [PLAIN, None]
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 5, 1), ("b", 11, 9), ("c", 0, 3)]
    assert [row.is_prefill for row in batch.requests] == [False, True, True]
    assert (batch.phase, batch.num_tokens, batch.num_prefill_tokens) == ("mixed", 13, 12)
    commit(scheduler, batch)
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 6, 1), ("b", 20, 1), ("c", 3, 1)]
    assert batch.phase == "decode"
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_decoding) == (3, 0, 3)


def test_decodes_come_before_earlier_prefills() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    scheduler.add(make_request("a", 20))
    scheduler.add(make_request("b", 2))
    assert step(scheduler) == [("a", 0, 4), ("b", 0, 2)]
    assert step(scheduler) == [("b", 2, 1), ("a", 4, 4)]


def test_last_chunk_of_one_token_is_a_prefill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", 5))
    step(scheduler)
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 4, 1)]
    assert batch.requests[0].is_prefill
    assert batch.requests[0].needs_sample
    assert batch.phase == "prefill"


def test_nothing_to_do() -> None:
    scheduler = make_scheduler()
    batch = scheduler.schedule()
    assert (batch.phase, batch.requests, batch.num_tokens) == ("idle", (), 0)
    assert scheduler.commit(batch, []) == []
    assert not scheduler.has_unfinished


def test_sequence_limit() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 2, max_tokens=2))
    assert step(scheduler) == [("a", 0, 2), ("b", 0, 2)]
    assert step(scheduler) == [("a", 2, 1), ("b", 2, 1)]
    assert step(scheduler) == [("c", 0, 2)]


def test_whole_prompts_without_chunking_keep_their_turn() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, long_prefill_token_threshold=2)
    for name, num_tokens in (("a", 10), ("b", 9), ("c", 2)):
        scheduler.add(make_request(name, num_tokens, max_tokens=3))
    assert step(scheduler) == [("a", 0, 10)]  # b does not fit, and c does not overtake it
    assert step(scheduler) == [("a", 10, 1), ("b", 0, 9), ("c", 0, 2)]


def test_whole_prompts_after_a_preemption_still_fit_a_step() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False)
    assert scheduler.max_len == 17
    with pytest.raises(CapacityError, match=r"17 tokens, at most 16 fit .*max_num_batched_tokens"):
        scheduler.add(make_request("a", 17))
    request = make_request("b", 10)
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler)
    assert (request.num_tokens, request.finish_reason) == (17, "length")


def test_prefill_interval_protects_decodes() -> None:
    scheduler = make_scheduler(prefill_interval=3)
    scheduler.add(make_request("a", 2))
    assert step(scheduler, step=1) == [("a", 0, 2)]  # no decodes: at once
    scheduler.add(make_request("b", 20))
    assert step(scheduler, step=2) == [("a", 2, 1)]
    assert step(scheduler, step=3) == [("a", 3, 1), ("b", 0, 15)]
    assert step(scheduler, step=4) == [("a", 4, 1)]
    scheduler.abort(["a"])
    assert step(scheduler, step=5, protect_decodes=True) == []  # another rank decodes
    assert scheduler.has_unfinished
    assert step(scheduler, step=5) == [("b", 15, 5)]


def test_eos_stop_token_and_length() -> None:
    scheduler = make_scheduler()
    a, b, c = make_request("a", 2), make_request("b", 2, stop_token_ids=[STOP, EOS]), make_request("c", 2, max_tokens=1)
    for request in (a, b, c):
        scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduler.commit(batch, [EOS, STOP, PLAIN]) == [(a, EOS), (b, STOP), (c, PLAIN)]
    assert (a.finish_reason, a.stop_reason) == ("stop", None)
    assert (b.finish_reason, b.stop_reason) == ("stop", STOP)
    assert (c.finish_reason, c.stop_reason) == ("length", None)
    assert a.token_ids[2:] == [EOS]
    assert a.status is RequestStatus.FINISHED
    assert not scheduler.has_unfinished


def test_a_stop_token_that_is_eos_counts_as_eos() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2, stop_token_ids=[EOS])
    scheduler.add(request)
    step(scheduler, EOS)
    assert (request.finish_reason, request.stop_reason) == ("stop", None)


def test_min_tokens_holds_back_stops_but_not_the_length_limit() -> None:
    scheduler = make_scheduler(max_model_len=6)
    a, b = make_request("a", 2, min_tokens=3), make_request("b", 4, min_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    step(scheduler, EOS)
    step(scheduler, EOS)
    assert (a.finish_reason, b.finish_reason, b.num_tokens) == (None, "length", 6)
    step(scheduler, EOS)
    assert (a.finish_reason, a.num_output_tokens) == ("stop", 3)


def test_requests_that_never_fit() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4, max_model_len=64)
    with pytest.raises(CapacityError, match=r"13 tokens, at most 12 fit .*KV cache"):
        scheduler.add(make_request("a", 13))
    scheduler.add(make_request("b", 12))
    with pytest.raises(CapacityError, match=r"64 tokens, at most 63 fit .*max_model_len"):
        make_scheduler().add(make_request("c", 64))
    with pytest.raises(ConfigError, match="request_id"):
        scheduler.add(make_request("b", 3))
    with pytest.raises(ConfigError, match="prompt_token_ids"):
        scheduler.add(make_request("d", 0))
    assert scheduler.num_waiting == 1


def test_a_request_that_fills_the_cache_ends_by_length() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    request = make_request("a", 6)
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler)
    assert (request.num_tokens, request.finish_reason, scheduler.num_preemptions) == (9, "length", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("max_model_len", 1),
        ("long_prefill_token_threshold", -1),
        ("prefill_interval", 0),
    ],
)
def test_wrong_options(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: {value} "):
        make_scheduler(**dict[str, Any]({field: value}))


def test_same_prefix_in_the_same_step() -> None:
    """The second reads blocks that the first writes in this very step; its row comes after the writer's."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    prefix = [*range(10, 26)]
    requests = [Request(EngineRequest(name, [*prefix, ord(name)], SamplingParams())) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 0, 17), ("b", 16, 1)]
    assert batch.requests[1].is_prefill
    assert batch.requests[0].block_ids[:4] == batch.requests[1].block_ids[:4]
    counters = scheduler.counters()
    assert (counters.num_prefix_queries, counters.num_prefix_hits, counters.num_running) == (34, 16, 2)
    assert counters.kv_usage == pytest.approx(6 / 64)


def test_only_the_blocks_of_scheduled_chunks_are_hit() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=6)
    for name in ("a1", "a2"):
        scheduler.add(make_request(name, 14))
    assert step(scheduler) == [("a1", 0, 6), ("a2", 4, 6)]


def test_no_torch() -> None:
    code = "import sys, hocket.scheduler.scheduler, hocket.cache.manager; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
