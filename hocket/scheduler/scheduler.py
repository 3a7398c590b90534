"""Continuous batching: which tokens a step computes, who waits, who is preempted. Knows no tensors, ranks or splits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.cache.manager import KVCacheManager
from hocket.errors import CapacityError, ConfigError
from hocket.request import FinishReason, Request, RequestStatus
from hocket.scheduler.batch import Batch, BatchBuilder

_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerCounters:
    """A snapshot. Totals since start: preemptions; prefix queries and hits in tokens. kv_usage: 0 to 1."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    kv_usage: float


class Scheduler:
    """First come, first served, over one pool of KV blocks.

    `schedule(n)`, run, `commit(n)`. Tokens count as computed once they are scheduled, so `schedule(n + 1)` may come
    before `commit(n)` (one step ahead, not more): it continues each decode with the token that step n samples. If that
    token ends the request, its extra row in n + 1 is thrown away by `commit(n + 1)`.

    All running requests arrived before all waiting ones: only the head of the queue is admitted, and only the last
    running request is preempted, back to the head.

    max_num_seqs: most running requests. max_num_batched_tokens: most tokens of a step. max_model_len: most tokens of a
    request, prompt and output; also bounded by the cache and, without chunked prefill, by max_num_batched_tokens.
    enable_chunked_prefill: a prompt may be spread over several steps, each filled up with what the decodes leave.
    long_prefill_token_threshold: most prefill tokens of one request a step when prompts are chunked; 0: no such limit.
    prefill_interval: while there are decodes to protect, prefill only in steps whose number is a multiple of this.

    Raises ConfigError for values that cannot work.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cache: KVCacheManager,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        prefill_interval: int = 1,
    ) -> None:
        _check_at_least("max_num_seqs", max_num_seqs, 1)
        if max_num_batched_tokens < max_num_seqs:
            allowed = f"at least max_num_seqs ({max_num_seqs}), so that every running request can decode"
            raise ConfigError("max_num_batched_tokens", max_num_batched_tokens, allowed)
        _check_at_least("max_model_len", max_model_len, 2)
        _check_at_least("long_prefill_token_threshold", long_prefill_token_threshold, 0)
        _check_at_least("prefill_interval", prefill_interval, 1)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.prefill_interval = prefill_interval
        self.num_preemptions = 0
        # A request's last token is never computed, hence the + 1.
        limits = {
            "max_model_len, with one output token": max_model_len,
            "size of the KV cache": cache.num_blocks * cache.block_size + 1,
        }
        if not enable_chunked_prefill:
            limits["max_num_batched_tokens, without chunked prefill"] = max_num_batched_tokens + 1
        self.max_len_limit = min(limits, key=limits.__getitem__)
        self.max_len = limits[self.max_len_limit]
        self._cache = cache
        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._running: list[Request] = []  # in order of arrival
        self._prefilling: dict[str, Request] = {}  # the running ones with prefill tokens left, in order of arrival
        self._waiting: deque[Request] = deque()  # in order of arrival; finished ones are dropped when they come up

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def request_ids(self) -> list[str]:
        """Of all unfinished requests."""
        return list(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Not yet admitted, or preempted."""
        return len(self._requests) - len(self._running)

    @property
    def num_decoding(self) -> int:
        """Running requests whose prefill has been scheduled to its end."""
        return len(self._running) - len(self._prefilling)

    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_preemptions=self.num_preemptions,
            num_prefix_queries=self._cache.num_prefix_queries,
            num_prefix_hits=self._cache.num_prefix_hits,
            kv_usage=self._cache.usage,
        )

    def forget_prefixes(self) -> None:
        """No request finds anything in the cache that was computed before. Those that run keep their blocks."""
        self._cache.clear_prefixes()

    def add(self, request: Request) -> None:
        """Queues a request. CapacityError if it could never run; ConfigError if it is empty or its id is in use."""
        if request.request_id in self._requests:
            raise ConfigError("request_id", request.request_id, "an id that no unfinished request has")
        if request.num_prompt_tokens == 0:
            raise ConfigError("prompt_token_ids", [], "at least one token")
        if request.num_prompt_tokens >= self.max_len:
            raise CapacityError(
                f"request {request.request_id!r}: the prompt has {request.num_prompt_tokens} tokens, "
                f"at most {self.max_len - 1} fit (limit: {self.max_len_limit})"
            )
        self._requests[request.request_id] = request
        self._waiting.append(request)
        request.queued_at = time.perf_counter()

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests now, wherever they are; ids that are unknown or have finished are skipped.

        A batch that holds such a request still runs unchanged; its row is thrown away by `commit`.
        """
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
                aborted.append(request)
        return aborted

    def schedule(self, step: int = 0, protect_decodes: bool = False) -> Batch:
        """The next step's batch; empty when there is nothing to do now.

        Running decodes first, then running prefills, then waiting requests while the budget, the sequences and the
        blocks last. step: the step's number, the same on all ranks. protect_decodes: other ranks have running decodes
        that a long step here would delay (this rank's own are known); matters only with prefill_interval > 1.
        """
        builder = BatchBuilder(self.max_num_batched_tokens)
        self._schedule_decodes(builder)
        if self._may_prefill(step, protect_decodes):
            self._schedule_prefills(builder)
            if not builder.is_short:
                self._admit_waiting(builder)
        return builder.build()

    def _may_prefill(self, step: int, protect_decodes: bool) -> bool:
        return step % self.prefill_interval == 0 or not (protect_decodes or self.num_decoding)

    def _schedule_decodes(self, builder: BatchBuilder) -> None:
        """One token for every request past its prefill; max_num_seqs <= max_num_batched_tokens: the budget suffices."""
        prefilling, allocate = self._prefilling, self._cache.allocate
        for request in self._running:  # preemption shortens it from its end
            if request.request_id in prefilling or self._ends_in_flight(request):
                continue
            if allocate(request, 1) or self._make_room(request, 1, builder):
                builder.add(request, 1, is_prefill=False)

    def _ends_in_flight(self, request: Request) -> bool:
        """Whether a sample of a step not yet committed is certain to be the request's last, by its length."""
        num_computed = request.num_computed_tokens
        if num_computed < len(request.token_ids):
            return False
        return num_computed + 1 >= min(self.max_len, request.num_prompt_tokens + request.max_tokens)

    def _schedule_prefills(self, builder: BatchBuilder) -> None:
        """The next chunk of every running prefill, while the budget lasts."""
        for request in list(self._prefilling.values()):
            if builder.budget == 0:
                break
            if request.status is not _RUNNING:
                continue  # preempted in this loop
            num_tokens = self._chunk(request, request.num_computed_tokens, builder.budget)
            if self._make_room(request, num_tokens, builder):
                self._add_prefill(request, num_tokens, builder)

    def _admit_waiting(self, builder: BatchBuilder) -> None:
        """Starts waiting requests in order; the first that does not fit stops the rest, so that nobody starves."""
        cache, waiting = self._cache, self._waiting
        num_owed = sum(map(cache.num_owed_blocks, self._prefilling.values()))
        while waiting and builder.budget > 0 and len(self._running) < self.max_num_seqs:
            request = waiting[0]
            if request.status is _FINISHED:
                waiting.popleft()
                continue
            cached_block_ids = cache.lookup(request)
            num_tokens = self._chunk(request, len(cached_block_ids) * cache.block_size, builder.budget)
            if num_tokens == 0 or not cache.admit(request, cached_block_ids, num_owed):
                return
            waiting.popleft()
            request.status = _RUNNING
            request.admitted_at = request.admitted_at or time.perf_counter()
            self._running.append(request)
            self._prefilling[request.request_id] = request
            has_blocks = cache.allocate(request, num_tokens)
            assert has_blocks, "admit() saw room for the whole request"
            self._add_prefill(request, num_tokens, builder)
            num_owed += cache.num_owed_blocks(request)

    def _chunk(self, request: Request, start: int, budget: int) -> int:
        """How many tokens from `start` on this step may compute; 0: a whole prompt that does not fit this step."""
        num_left = len(request.token_ids) - start
        if not self.enable_chunked_prefill:
            return num_left if num_left <= budget else 0
        return min(num_left, budget, self.long_prefill_token_threshold or num_left)

    def _add_prefill(self, request: Request, num_tokens: int, builder: BatchBuilder) -> None:
        builder.add(request, num_tokens, is_prefill=True)
        if request.num_computed_tokens == len(request.token_ids):
            del self._prefilling[request.request_id]

    def _make_room(self, request: Request, num_tokens: int, builder: BatchBuilder) -> bool:
        """Blocks for the next tokens of a running request, preempting later arrivals as needed.

        False: it is itself the last arrival. It keeps its blocks and sits this step out, which costs no recomputation;
        it is preempted only when an earlier one needs them.
        """
        while not self._cache.allocate(request, num_tokens):
            builder.is_short = True  # nobody is admitted in this step
            if self._running[-1] is request:
                return False
            self._preempt_last(builder)
        return True

    def _preempt_last(self, builder: BatchBuilder) -> None:
        """Sends the last arrival back to the head of the queue; all it has computed is computed again later."""
        request = self._running[-1]
        row = builder.remove(request)
        if row is not None:  # a decode already in this step, preempted for an earlier request's prefill
            self._cache.forget(request, row.start, row.start + row.num_tokens)
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """The running request `request`, the last arrival, goes back to the head of the queue."""
        assert self._running.pop() is request
        self._prefilling.pop(request.request_id, None)
        self._cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def retract(self, batch: Batch) -> None:
        """`batch` will not run: every running request starts again later, also those that only read what it writes."""
        for row in batch.requests:
            self._cache.forget(row.request, row.start, row.start + row.num_tokens)
        for request in reversed(list(self._running)):
            self._preempt(request)

    def commit(self, batch: Batch, sampled: Sequence[int | None]) -> list[tuple[Request, int | None]]:
        """Takes in the tokens sampled by a step and ends the requests they end.

        sampled: aligned with batch.requests; None where nothing was sampled. Returns, in the same order, each request
        with its new token; None: none this step, or thrown away because the request had ended before.
        """
        accepted: list[tuple[Request, int | None]] = []
        for row, token_id in zip(batch.requests, sampled, strict=True):
            request = row.request
            # The position test throws away what is not the request's next token, such as samples of a partial prefill.
            if token_id is None or request.status is _FINISHED or row.start + row.num_tokens != len(request.token_ids):
                accepted.append((request, None))
                continue
            request.token_ids.append(token_id)
            self._finish_if_done(request, token_id)
            accepted.append((request, token_id))
        return accepted

    def _finish_if_done(self, request: Request, token_id: int) -> None:
        num_tokens = len(request.token_ids)
        num_output_tokens = num_tokens - request.num_prompt_tokens
        may_stop = num_output_tokens >= request.params.min_tokens
        if may_stop and token_id in request.eos_token_ids:
            self._finish(request, "stop")
        elif may_stop and request.params.stop_token_ids and token_id in request.params.stop_token_ids:
            self._finish(request, "stop", token_id)
        elif num_output_tokens >= request.max_tokens or num_tokens >= self.max_len:
            self._finish(request, "length")

    def fail(self, batch: Batch) -> list[Request]:
        """For a step that did not run or whose results are worthless, committed or not: ends its requests.

        What the step should have written is no longer found in the prefix cache. Steps scheduled after it and before
        this call may have read it: `retract` them.
        """
        for row in batch.requests:
            self._cache.forget(row.request, row.start, row.start + row.num_tokens)
        return self.abort(row.request.request_id for row in batch.requests if row.request.status is not _FINISHED)

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | None = None) -> None:
        if request.status is _RUNNING:
            self._running.remove(request)
            self._prefilling.pop(request.request_id, None)
        del self._requests[request.request_id]
        self._cache.free(request)
        request.status = _FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason


def _check_at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(field, value, f"at least {least}")
