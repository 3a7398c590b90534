"""One rank's engine: schedule → decide with the others → execute → commit. Knows nothing of processes or the front."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from hocket.cache.manager import KVCacheManager
from hocket.config.engine import EngineConfig
from hocket.dist.exchange import StepExchange, Table, now_us
from hocket.dist.mesh import Mesh
from hocket.errors import UBatchFailed
from hocket.outputs import TokenOutput
from hocket.overlap import vote
from hocket.overlap.cost import TokenCost, Wish, wished_cuts
from hocket.overlap.veto import prefix_hazard
from hocket.overlap.vote import Reason, Row, StepPlan
from hocket.request import EngineRequest, Request
from hocket.scheduler.batch import Batch
from hocket.scheduler.scheduler import Scheduler
from hocket.worker.runner import OnProgress, Runner, StepResult
from hocket.worker.stats import StepStats


@dataclass(slots=True)
class StepFailure:
    """A step whose results are worthless, and the requests that ended with it. is_cause: it failed on this rank."""

    message: str
    is_cause: bool
    request_ids: list[str]


class Engine:
    """Runs this rank's requests in lock-step with the other ranks of the expert group.

    `step()` is called by all ranks the same number of times, also by those without requests.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, exchange: StepExchange, on_progress: OnProgress) -> None:
        self.config = config
        self.mesh = mesh
        self.exchange = exchange
        self.runner = Runner(config, mesh, on_progress)
        limits = config.scheduler
        self.scheduler = Scheduler(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            cache=KVCacheManager(self.runner.num_blocks, config.cache.block_size, config.cache.enable_prefix_caching),
            enable_chunked_prefill=limits.enable_chunked_prefill,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            prefill_interval=limits.prefill_interval,
        )
        self.stats = StepStats()
        self._digest = config.digest
        self._token_cost = TokenCost.of(config.model)
        self._step = 0
        self._peers_decode = False
        self._ended_at: float | None = None
        self._lock_step = mesh.ep_size > 1
        self._held: list[TokenOutput] = []
        self._held_batch: Batch | None = None
        self._failed_here = False
        self._failure: StepFailure | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. Raises CapacityError for one that can never fit."""
        for engine_request in requests:
            self.scheduler.add(Request(engine_request))

    def abort(self, request_ids: list[str], reason: str = "abort") -> None:
        """End requests, counted under `reason`; unknown ids are ignored (they may just have finished)."""
        for request in self.scheduler.abort(request_ids):
            self.runner.forget(request.request_id)
            self.stats.count_finished(reason)

    def abort_all(self) -> None:
        """End every request."""
        self.abort(self.scheduler.request_ids())

    def step(self) -> tuple[list[TokenOutput], StepPlan]:
        """One step, together with all ranks. Returns what this rank's requests gained in the step before.

        A rank learns only in the next exchange whether a step failed on another one, so in lock-step outputs are held
        back until then; where one failed, its requests end on all ranks (`take_failure`).

        Raises:
            RankLost, StepDesync, BatonTimeout: another rank is late, gone or out of step, or a ubatch is stuck.
        """
        t0 = time.perf_counter()
        batch = self.scheduler.schedule(self._step, protect_decodes=self._peers_decode)
        column = vote.facts(
            batch,
            step=self._step,
            digest=self._digest,
            num_unfinished=int(self.scheduler.has_unfinished),
            refusal=self._refusal(batch),
            failure=int(self._failed_here),
            wish=self._wish(batch),
        )
        t1 = time.perf_counter()
        table = self.exchange.exchange(column)
        t2, table_us = time.perf_counter(), now_us()
        plan = vote.decide(table, self.config.overlap)
        self._step += 1
        self._peers_decode = plan.any_decodes
        if plan.failed is not None:
            self._fail(batch, plan.failed)
            self._ended_at = None
            return [], plan
        ready, self._held, self._held_batch = self._held, [], None
        if plan.is_idle:
            self._ended_at = None
            self.stats.count_step("idle", plan.reason.name.lower(), {})
            return ready, plan
        ubatches = self.runner.prepare(batch, plan)
        t3 = time.perf_counter()
        try:
            logits, prompt_logits = self.runner.forward(ubatches, batch, plan)
        except UBatchFailed as error:
            self._fail_here(batch, plan, error)
            return ready, plan
        t4 = time.perf_counter()
        result = self.runner.sample(batch, logits, prompt_logits)
        t5 = time.perf_counter()
        outputs = self._commit(batch, result)
        t6 = time.perf_counter()
        if self._lock_step:
            self._held, self._held_batch = outputs, batch
        else:
            ready = outputs
        exchange_us, wait_us = _split_exchange(table, table_us, (t2 - t1) * 1e6)
        channel = (t0 - self._ended_at) * 1e6 if self._ended_at is not None else 0.0
        self._ended_at = t6
        self.stats.count_step(
            batch.phase,
            plan.reason.name.lower(),
            {
                "schedule": (t1 - t0) * 1e6,
                "exchange": exchange_us,
                "wait": wait_us,
                "prepare": (t3 - t2) * 1e6,
                "forward": (t4 - t3) * 1e6,
                "sample": (t5 - t4) * 1e6,
                "commit": (t6 - t5) * 1e6,
                "channel": channel,
            },
            [part.layout.num_tokens for part in ubatches],
            comm_us=self.runner.executor.comm_ns / 1000,
            exposed_us=self.runner.executor.exposed_ns / 1000,
        )
        return ready, plan

    def _refusal(self, batch: Batch) -> Reason | None:
        """Why this rank's next step must not be split, if so."""
        if self.config.overlap.num_ubatches > 1 and prefix_hazard(batch, self.config.cache.block_size):
            return Reason.PREFIX_HAZARD
        return None

    def _wish(self, batch: Batch) -> Wish | None:
        """Where this rank would like its next step to be cut, if cuts go by cost."""
        overlap = self.config.overlap
        if overlap.num_ubatches > 1 and overlap.cut == "cost":
            return wished_cuts(batch, self._token_cost, overlap.num_ubatches)
        return None

    def _fail_here(self, batch: Batch, plan: StepPlan, error: UBatchFailed) -> None:
        """This rank's part of the step failed: its requests end now, the others learn of it in the next exchange."""
        self._held_batch = None
        self._failed_here = self._lock_step
        self._end_failed(batch, f"step {plan.step} failed on rank {self.mesh.rank}, {error}", is_cause=True)
        self._ended_at = None
        self.stats.count_failure(batch.phase, plan.reason.name.lower())

    def _fail(self, batch: Batch, failed: tuple[int, int]) -> None:
        """A step failed somewhere: what is held of it is worthless, and `batch`, scheduled on top of it, must wait."""
        self._failed_here = False
        held, self._held, self._held_batch = self._held_batch, [], None
        if held is not None:
            self._end_failed(held, f"the step before failed on rank {failed[0]}", is_cause=False)
        self.scheduler.retract(batch)
        self.stats.count_failure(batch.phase, "disabled")

    def _end_failed(self, batch: Batch, message: str, *, is_cause: bool) -> None:
        self.scheduler.fail(batch)
        ids = [row.request.request_id for row in batch.requests]
        for request_id in ids:
            self.runner.forget(request_id)
            self.stats.count_finished("error")
        if self._failure is None:
            self._failure = StepFailure(message, is_cause, [])
        self._failure.request_ids += ids

    def take_failure(self) -> StepFailure | None:
        """What failed since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def _commit(self, batch: Batch, result: StepResult) -> list[TokenOutput]:
        """Give the sampled tokens to the scheduler and make what is sent to the front."""
        logprobs = {
            s.request.request_id: value
            for s, value in zip(batch.requests, result.logprobs, strict=True)
            if value is not None
        }
        outputs = []
        for request, token in self.scheduler.commit(batch, result.token_ids):
            if token is None:
                continue
            logprob = logprobs.get(request.request_id)
            outputs.append(
                TokenOutput(
                    request_id=request.request_id,
                    token_ids=[token],
                    logprobs=None if logprob is None else [logprob],
                    prompt_logprobs=result.prompt_logprobs.get(request.request_id),
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason,
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
            if request.finish_reason is not None:
                self.stats.count_finished(request.finish_reason)
        self.stats.prompt_tokens += batch.num_prefill_tokens
        self.stats.generated_tokens += len(outputs)
        return outputs

    def close(self) -> None:
        self.runner.close()
        self.exchange.close()


def _split_exchange(table: Table, table_us: int, total_us: float) -> tuple[float, float]:
    """(µs from the last rank's arrival until the table was here at `table_us`, µs waited for that arrival).

    Arrival times are comparable between ranks of one host only; the sum is always this rank's own measurement.
    """
    since = min((table_us - column[Row.ARRIVAL_US]) & 0x7FFFFFFF for column in table)
    exchange = min(float(since), total_us)
    return exchange, total_us - exchange
