"""Random requests, aborts, failures and look-ahead against a pretend device that records what each KV slot holds.

The device knows no scheduler rule. A slot's content is the whole token prefix it was computed from, and the "model"
is a fixed function of that prefix, so any wrong block, missing token or double token shows as a wrong prefix.
"""

from __future__ import annotations

from collections import Counter, deque
from zlib import crc32

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hocket.cache.manager import KVCacheManager
from hocket.errors import CapacityError
from hocket.request import EngineRequest, Request, RequestStatus, SamplingParams
from hocket.scheduler.batch import Batch
from hocket.scheduler.scheduler import Scheduler

EOS, STOP, MAX_MODEL_LEN = 5, 6, 24
PATTERNS = [[0], [0, 1], [0, 0, 0, 0, 0, 1]]
LOGPROBS = [None, None, None, 0]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        threshold=st.sampled_from([0, 0, 1, 3, 5]),
        interval=st.sampled_from([1, 1, 2, 3]),
        is_chunked=st.booleans(),
        is_caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        threshold: int,
        interval: int,
        is_chunked: bool,
        is_caching: bool,
    ) -> None:
        self.cache = KVCacheManager(num_blocks, block_size, is_caching)
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            cache=self.cache,
            enable_chunked_prefill=is_chunked,
            long_prefill_token_threshold=threshold,
            prefill_interval=interval,
        )
        capacity = num_blocks * block_size
        self.max_prompt = min(MAX_MODEL_LEN - 1, capacity, 99 if is_chunked else max_num_seqs + extra_budget)
        self.requests: dict[str, Request] = {}  # in order of arrival, finished ones too
        self.truth: dict[str, list[int]] = {}  # prompt, then what the model says, for ever
        self.slots: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self.unlaunched: Batch | None = None
        self.in_flight: deque[Batch] = deque()  # scheduled, not committed
        self.next_start: dict[tuple[str, int], int] = {}  # (request, num_preemptions) → first token not yet scheduled
        self.prefill_end: dict[tuple[str, int], int] = {}
        self.step = 0

    # What happens

    @rule(data=st.data(), count=st.integers(1, 5))
    def add_several(self, data: st.DataObject, count: int) -> None:
        """Few different prompts of every length that fits, so that they share prefixes and fill the cache."""
        for _ in range(count):
            num_tokens = data.draw(st.integers(1, self.max_prompt))
            prompt = [*data.draw(st.sampled_from(PATTERNS)) * MAX_MODEL_LEN][:num_tokens]
            self.add(prompt, *data.draw(st.tuples(st.integers(1, 12), st.integers(0, 3), st.sampled_from(LOGPROBS))))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN))
    def add_any(self, prompt: list[int]) -> None:
        self.add(prompt, 4, 0, None)

    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, prompt_logprobs: int | None) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=[STOP],
        )
        name = f"r{len(self.requests)}"
        request = Request(EngineRequest(name, prompt, params, [EOS], [], max_tokens))
        try:
            self.scheduler.add(request)
        except CapacityError:
            assert len(prompt) > self.max_prompt
            return
        assert len(prompt) <= self.max_prompt
        self.requests[name] = request
        self.truth[name] = list(prompt)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule(protect=st.booleans())
    def schedule(self, protect: bool) -> None:
        self.launch()
        num_preemptions, lives = self.scheduler.num_preemptions, set(self.next_start)
        may_prefill = self.step % self.scheduler.prefill_interval == 0 or not (protect or self.scheduler.num_decoding)
        batch = self.scheduler.schedule(self.step, protect_decodes=protect)
        assert may_prefill or batch.num_prefill_tokens == 0
        self.check_batch(batch)
        assert num_preemptions == self.scheduler.num_preemptions or lives == set(self.next_start)
        self.unlaunched = batch
        self.in_flight.append(batch)
        self.step += 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self.launch()
        batch = self.in_flight.popleft()
        was_finished = [row.request.is_finished for row in batch.requests]
        before = [row.request.num_tokens for row in batch.requests]
        sampled = [
            self.tokens(row.request, row.start + row.num_tokens + 1)[-1] if row.needs_sample else None
            for row in batch.requests
        ]
        results = self.scheduler.commit(batch, sampled)
        for row, finished, num_before, token_id, result in zip(
            batch.requests, was_finished, before, sampled, results, strict=True
        ):
            assert result == (row.request, None if finished else token_id)
            assert row.request.num_tokens == num_before + (result[1] is not None)

    @rule(num_steps=st.integers(2, 9), is_ahead=st.booleans())
    def run(self, num_steps: int, is_ahead: bool) -> None:
        for _ in range(num_steps):
            while len(self.in_flight) > is_ahead:
                self.commit()
            self.schedule(protect=False)
            self.blocks_are_counted()

    @rule(data=st.data(), dice=st.integers(1, 12), is_launched=st.booleans())
    def interrupt(self, data: st.DataObject, dice: int, is_launched: bool) -> None:
        alive = [name for name, request in self.requests.items() if not request.is_finished]
        if dice == 12:
            self.fail(is_launched)
        elif alive and dice > 6:
            self.abort(data.draw(st.lists(st.sampled_from(alive), min_size=1, max_size=2)))

    def abort(self, names: list[str]) -> None:
        aborted = self.scheduler.abort([*names, "nobody"])
        assert {request.request_id for request in aborted} == set(names)
        assert all(request.finish_reason == "abort" for request in aborted)

    def fail(self, is_launched: bool) -> None:
        if is_launched:
            self.launch()
        self.unlaunched = None
        while self.in_flight:
            batch = self.in_flight.popleft()
            self.scheduler.fail(batch)
            for row in batch.requests:
                assert row.request.is_finished
                for position in range(row.start, row.start + row.num_tokens):
                    self.slots[self.slot(row.block_ids, position)] = None

    def teardown(self) -> None:
        """Everything ends within a bounded number of steps, with the right tokens, and all blocks come back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(60 * (len(self.requests) + 1) * self.scheduler.prefill_interval):
            if not self.scheduler.has_unfinished:
                break
            if len(self.in_flight) == 2:
                self.commit()
            self.schedule(protect=False)
            self.blocks_are_counted()
        assert not self.scheduler.has_unfinished
        while self.in_flight:
            self.commit()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        for request in self.requests.values():
            self.check_ended_right(request)

    # The device

    def tokens(self, request: Request, length: int) -> list[int]:
        truth = self.truth[request.request_id]
        while len(truth) < length:
            truth.append(crc32(bytes(truth)) % 16)
        return truth[:length]

    def slot(self, block_ids: list[int], position: int) -> tuple[int, int]:
        return block_ids[position // self.cache.block_size], position % self.cache.block_size

    def launch(self) -> None:
        """Row after row: writes the new tokens' slots, then reads all slots up to the last new token."""
        batch, self.unlaunched = self.unlaunched, None
        for row in batch.requests if batch is not None else ():
            end = row.start + row.num_tokens
            tokens = self.tokens(row.request, end)
            for position in range(row.start, end):
                self.slots[self.slot(row.block_ids, position)] = tuple(tokens[: position + 1])
            for position in range(end):
                assert self.slots[self.slot(row.block_ids, position)] == tuple(tokens[: position + 1])

    # What must hold

    def check_batch(self, batch: Batch) -> None:
        rows = batch.requests
        assert batch.num_tokens == sum(row.num_tokens for row in rows) <= self.scheduler.max_num_batched_tokens
        assert batch.num_prefill_tokens == sum(row.num_tokens for row in rows if row.is_prefill)
        assert len({row.request.request_id for row in rows}) == len(rows) <= self.scheduler.max_num_seqs
        assert sorted(rows, key=lambda row: row.is_prefill) == list(rows)
        for row in rows:
            request, end = row.request, row.start + row.num_tokens
            life = (request.request_id, request.num_preemptions)
            if life not in self.next_start:
                self.check_admission(request, row.start)
                self.prefill_end[life] = request.num_tokens
            assert row.start == self.next_start.get(life, row.start)
            self.next_start[life] = end
            assert row.num_tokens >= 1
            assert row.is_prefill == (row.start < self.prefill_end[life])
            assert row.needs_sample == (end >= self.prefill_end[life])
            assert row.needs_sample == (end >= request.num_tokens)
            assert row.num_tokens == 1 or end <= self.prefill_end[life]
            assert end < MAX_MODEL_LEN
            assert end <= request.num_prompt_tokens + request.max_tokens
            assert len(row.block_ids) == -(-end // self.cache.block_size)
            if not self.scheduler.enable_chunked_prefill:
                assert row.needs_sample
            elif row.is_prefill and self.scheduler.long_prefill_token_threshold:
                assert row.num_tokens <= self.scheduler.long_prefill_token_threshold

    def check_admission(self, request: Request, start: int) -> None:
        """First come, first served; a hit is whole blocks, leaves a token, and is not read where that is forbidden."""
        for earlier in self.requests.values():
            if earlier is request:
                break
            assert earlier.status in (RequestStatus.RUNNING, RequestStatus.FINISHED)
        assert start % self.cache.block_size == 0
        assert start < request.num_tokens
        if request.params.prompt_logprobs is not None or not self.cache.enable_prefix_caching:
            assert start == 0
        if request.num_preemptions == 0:
            assert request.num_cached_tokens == start

    def check_ended_right(self, request: Request) -> None:
        assert request.block_ids == []
        assert request.token_ids == self.tokens(request, request.num_tokens)
        output, params = request.output_token_ids, request.params
        stops = [i + 1 for i, token in enumerate(output) if token in (EOS, STOP) and i + 1 >= params.min_tokens]
        if request.finish_reason == "abort":
            assert not stops
        elif request.finish_reason == "stop":
            assert stops == [len(output)]
            assert request.stop_reason == (STOP if output[-1] == STOP else None)
        else:
            assert request.finish_reason == "length"
            assert not stops
            assert len(output) == request.max_tokens or request.num_tokens == self.scheduler.max_len

    @invariant()
    def blocks_are_counted(self) -> None:
        """Owners' tables and reference counts agree; a block is free or owned, never both, never lost."""
        if not hasattr(self, "scheduler"):
            return
        owners: Counter[int] = Counter()
        for request in self.requests.values():
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert not request.block_ids or request.status is RequestStatus.RUNNING
            owners.update(request.block_ids)
        pool = self.cache._pool
        assert [pool.ref_count(i) for i in range(pool.num_blocks)] == [owners[i] for i in range(pool.num_blocks)]
        free = [*pool._blank, *pool._kept]
        assert sorted(free) == [i for i in range(pool.num_blocks) if owners[i] == 0]
        assert all((pool._name_of[i] is None) == (i in pool._blank) for i in free)
        assert {name: i for i, name in enumerate(pool._name_of) if name is not None} == pool._block_of

    @invariant()
    def queues_are_counted(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        statuses = Counter(request.status for request in self.requests.values())
        assert self.scheduler.num_running == statuses[RequestStatus.RUNNING] <= self.scheduler.max_num_seqs
        assert self.scheduler.num_waiting == statuses[RequestStatus.WAITING] + statuses[RequestStatus.PREEMPTED]
        decoding = [life for life, end in self.prefill_end.items() if self.next_start[life] >= end]
        lives = [(name, r.num_preemptions) for name, r in self.requests.items() if r.status is RequestStatus.RUNNING]
        assert self.scheduler.num_decoding == len(set(decoding) & set(lives))
        assert self.scheduler.has_unfinished == (statuses[RequestStatus.FINISHED] < len(self.requests))
        assert self.scheduler.num_preemptions == sum(request.num_preemptions for request in self.requests.values())
        assert not set(self.cache._num_named) & {n for n, request in self.requests.items() if request.is_finished}


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
