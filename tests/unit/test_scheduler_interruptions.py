"""What cuts across a request's life: preemption, aborts, failed steps, scheduling ahead of commit."""

from __future__ import annotations

from scheduling import EOS, PLAIN, commit, make_request, make_scheduler, rows, step

from hocket.request import EngineRequest, Request, RequestStatus, SamplingParams
from hocket.scheduler.batch import Batch, BatchBuilder


def test_last_arrival_is_preempted_and_recomputed() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, is_caching=False, max_num_seqs=2)
    a, b, c = make_request("a", 7, max_tokens=6), make_request("b", 7, max_tokens=4), make_request("c", 1)
    for request in (a, b, c):
        scheduler.add(request)
    step(scheduler)  # both hold two blocks
    step(scheduler)  # both blocks are full
    assert step(scheduler) == [("a", 8, 1)]
    assert (b.status, b.num_preemptions, b.num_computed_tokens, b.block_ids) == (RequestStatus.PREEMPTED, 1, 0, [])
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 2)
    for _ in range(3):
        assert len(step(scheduler)) == 1
    assert a.finish_reason == "length"
    assert step(scheduler) == [("b", 0, 9), ("c", 0, 1)]  # b is first again
    assert (b.num_output_tokens, b.status) == (3, RequestStatus.RUNNING)
    assert scheduler.counters().num_preemptions == 1


def test_last_arrival_without_a_block_waits_with_what_it_has() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, is_caching=False)
    scheduler.add(make_request("a", 5, max_tokens=3))
    b = make_request("b", 8, max_tokens=9)
    scheduler.add(b)
    step(scheduler)
    assert step(scheduler) == [("a", 5, 1)]
    assert (b.num_preemptions, len(b.block_ids)) == (0, 2)
    assert step(scheduler) == [("a", 6, 1)]
    assert step(scheduler) == [("b", 8, 1)]
    assert scheduler.num_preemptions == 0


def test_preempted_prefill_is_out_of_the_step() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2, long_prefill_token_threshold=2)
    d, e, p, q = make_request("d", 2), make_request("e", 2), make_request("p", 6), make_request("q", 6)
    for request in (d, e, p, q):
        scheduler.add(request)
    assert step(scheduler) == [("d", 0, 2), ("e", 0, 2), ("p", 0, 2), ("q", 0, 2)]
    assert step(scheduler) == [("d", 2, 1), ("e", 2, 1), ("p", 2, 2), ("q", 2, 2)]
    assert step(scheduler) == [("d", 3, 1), ("e", 3, 1), ("p", 4, 2)]
    assert (q.status, q.block_ids) == (RequestStatus.PREEMPTED, [])
    assert (scheduler.num_running, scheduler.num_decoding, scheduler.num_waiting) == (3, 3, 1)


def test_a_decode_leaves_the_step_for_an_earlier_prefill() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2, long_prefill_token_threshold=4)
    a, b = make_request("a", 12), make_request("b", 2)
    scheduler.add(a)
    scheduler.add(b)
    assert step(scheduler) == [("a", 0, 4), ("b", 0, 2)]
    assert step(scheduler) == [("b", 2, 1), ("a", 4, 4)]
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 8, 4)]
    assert (batch.num_tokens, batch.num_prefill_tokens, batch.phase) == (4, 4, "prefill")
    assert (b.status, b.num_preemptions, b.num_tokens) == (RequestStatus.PREEMPTED, 1, 4)
    commit(scheduler, batch)
    scheduler.abort("a")
    assert step(scheduler) == [("b", 2, 2)]  # of what it had, only the prompt's block was computed


def test_a_row_taken_out_gives_its_tokens_back() -> None:
    builder = BatchBuilder(10)
    request = make_request("a", 4)
    builder.add(request, 4, is_prefill=True)
    assert builder.budget == 6
    row = builder.remove(request)
    assert row is not None
    assert (row.start, row.num_tokens, builder.budget, builder.remove(request)) == (0, 4, 10, None)
    assert builder.build() == Batch()


def test_name_of_a_dropped_decode_goes_even_if_its_block_stays_free() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2, long_prefill_token_threshold=4)
    d, e, p, b = make_request("d", 2), make_request("e", 2), make_request("p", 8), make_request("b", 1)
    for request in (d, e, p, b):
        scheduler.add(request)
    assert step(scheduler) == [("d", 0, 2), ("e", 0, 2), ("p", 0, 4), ("b", 0, 1)]
    # b fills its block, then makes room for p, which is not enough.
    assert step(scheduler) == [("d", 2, 1), ("e", 2, 1)]
    assert (b.status, p.status, p.num_computed_tokens) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING, 4)
    scheduler.add(Request(EngineRequest("c", [*b.token_ids, 5], SamplingParams())))
    scheduler.abort(["d", "e", "p", "b"])
    assert step(scheduler) == [("c", 0, 3)]


def test_room_for_begun_prompts_is_not_given_to_others() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, long_prefill_token_threshold=4)
    scheduler.add(make_request("a", 16))
    scheduler.add(make_request("b", 9))
    assert step(scheduler) == [("a", 0, 4)]  # five blocks are free, but three of them are for the rest of a
    scheduler.add(make_request("c", 1))
    assert step(scheduler) == [("a", 4, 4)]  # c does not overtake b


def test_whole_request_must_fit_before_it_is_begun() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, long_prefill_token_threshold=4)
    scheduler.add(make_request("a", 6))
    scheduler.add(make_request("b", 13))
    assert step(scheduler) == [("a", 0, 4)]
    assert step(scheduler) == [("a", 4, 2)]


def test_abort_everywhere() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    requests = {name: make_request(name, 6, max_tokens=9) for name in "abcd"}
    for request in requests.values():
        scheduler.add(request)
    batch = scheduler.schedule()
    assert rows(batch) == [("a", 0, 6), ("b", 0, 6)]
    tables = [list(row.block_ids) for row in batch.requests]
    assert scheduler.abort(["a", "a", "c", "nobody"]) == [requests["a"], requests["c"]]
    assert requests["a"].finish_reason == requests["c"].finish_reason == "abort"
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert [list(row.block_ids) for row in batch.requests] == tables  # the step still runs with them
    assert commit(scheduler, batch) == [None, PLAIN]
    assert requests["a"].num_output_tokens == 0
    assert step(scheduler) == [("b", 6, 1), ("d", 0, 6)]
    assert scheduler.abort("bd") == [requests["b"], requests["d"]]
    assert scheduler.abort("bd") == []
    assert not scheduler.has_unfinished
    assert scheduler.counters().kv_usage == 0.0
    scheduler.add(make_request("a", 3))  # an id may be used again


def test_abort_in_mid_prefill() -> None:
    scheduler = make_scheduler(prefill_interval=2)
    scheduler.add(make_request("a", 40))
    step(scheduler)
    scheduler.abort("a")
    assert (scheduler.num_running, scheduler.num_decoding, scheduler.counters().kv_usage) == (0, 0, 0.0)


def test_schedule_ahead_of_commit_throws_the_extra_row_away() -> None:
    scheduler = make_scheduler()
    a, b = make_request("a", 3), make_request("b", 2)
    scheduler.add(a)
    scheduler.add(b)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert rows(second) == [("a", 3, 1), ("b", 2, 1)]
    assert all(row.needs_sample and not row.is_prefill for row in second.requests)
    assert scheduler.commit(first, [EOS, PLAIN]) == [(a, EOS), (b, PLAIN)]
    third = scheduler.schedule()
    assert rows(third) == [("b", 3, 1)]
    assert second.requests[0].block_ids  # the extra row still knows where it would write
    assert scheduler.commit(second, [PLAIN, PLAIN]) == [(a, None), (b, PLAIN)]
    assert a.token_ids[3:] == [EOS]
    assert commit(scheduler, third) == [PLAIN]
    assert b.num_output_tokens == 3


def test_no_extra_row_when_length_ends_the_request_anyway() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3, max_tokens=2)
    scheduler.add(request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert (rows(first), rows(second), rows(third)) == ([("a", 0, 3)], [("a", 3, 1)], [])
    commit(scheduler, first)
    commit(scheduler, second)
    assert request.finish_reason == "length"


def test_preempted_while_its_sample_is_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, is_caching=False)
    a, b = make_request("a", 8), make_request("b", 7)
    scheduler.add(a)
    scheduler.add(b)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert rows(second) == [("a", 8, 1)]
    assert b.status is RequestStatus.PREEMPTED
    assert commit(scheduler, first) == [PLAIN, PLAIN]  # the sample counts all the same
    assert b.num_output_tokens == 1
    scheduler.abort("a")
    assert step(scheduler) == [("b", 0, 8)]
    assert commit(scheduler, second) == [None]


def test_preempted_and_then_ended_by_its_sample_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, is_caching=False)
    b = make_request("b", 7)
    scheduler.add(make_request("a", 8))
    scheduler.add(b)
    first = scheduler.schedule()
    scheduler.schedule()
    scheduler.commit(first, [PLAIN, EOS])
    assert (b.finish_reason, scheduler.num_waiting) == ("stop", 0)
    scheduler.abort("a")
    assert scheduler.schedule().requests == ()


def test_failed_step_ends_its_requests_and_leaves_no_prefix() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    good = make_request("g", 8)
    scheduler.add(good)
    step(scheduler)
    a1, a2 = make_request("a1", 9), make_request("a2", 9)
    scheduler.add(a1)
    scheduler.add(a2)
    batch = scheduler.schedule()
    scheduler.add(make_request("w", 2))
    assert scheduler.fail(batch) == [good, a1, a2]
    assert a1.finish_reason == "abort"
    assert scheduler.num_waiting == 1
    scheduler.add(make_request("a3", 9))
    scheduler.add(make_request("g", 9))
    assert step(scheduler) == [("w", 0, 2), ("a3", 0, 9), ("g", 8, 1)]


def test_a_step_may_turn_out_failed_after_its_commit() -> None:
    scheduler = make_scheduler()
    a, b, c = make_request("a", 9, max_tokens=1), make_request("b", 9), make_request("c", 2)
    scheduler.add(a)
    scheduler.add(b)
    first = scheduler.schedule()
    commit(scheduler, first)
    scheduler.add(c)
    second = scheduler.schedule()
    assert scheduler.fail(first) == [b]  # a had ended
    assert scheduler.fail(second) == [c]
    assert (a.finish_reason, scheduler.has_unfinished, scheduler.counters().kv_usage) == ("length", False, 0.0)
    scheduler.add(make_request("a", 9))
    assert step(scheduler) == [("a", 0, 9)]


def test_a_retracted_step_is_computed_again_in_order() -> None:
    """What was scheduled on top of a failed step reads nothing that the failed step should have written."""
    scheduler = make_scheduler()
    a, b = make_request("a", 9), make_request("b", 5)
    scheduler.add(a)
    failed = scheduler.schedule()
    scheduler.add(b)
    scheduler.add(make_request("a2", 9))  # the same prompt: a hit on the blocks of the failed step
    on_top = scheduler.schedule()
    assert ("a2", 8, 1) in rows(on_top)
    assert scheduler.fail(failed) == [a]
    scheduler.retract(on_top)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.counters().kv_usage) == (0, 2, 0.0)
    assert commit(scheduler, failed) == [None]
    assert step(scheduler) == [("b", 0, 5), ("a2", 0, 9)]
