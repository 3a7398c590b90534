"""One rank's engine: schedule → decide with the others → execute → commit. Knows nothing of processes or the front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hocket.cache.manager import KVCacheManager
from hocket.config.engine import EngineConfig
from hocket.dist.exchange import StepExchange
from hocket.dist.mesh import Mesh
from hocket.dist.record import CLOSES
from hocket.errors import UBatchFailed
from hocket.outputs import TokenOutput
from hocket.overlap import vote
from hocket.overlap.cost import TokenCost, Wish, wished_cuts
from hocket.overlap.failure import FailedStage
from hocket.overlap.veto import prefix_hazard
from hocket.overlap.vote import Reason, StepPlan
from hocket.request import EngineRequest, Request
from hocket.scheduler.batch import Batch
from hocket.scheduler.scheduler import Scheduler
from hocket.worker.build import OnProgress
from hocket.worker.capture import TimeLimit, unlimited
from hocket.worker.in_flight import InFlight, StepResult
from hocket.worker.laps import Laps
from hocket.worker.runner import Runner
from hocket.worker.schemas import Schemas
from hocket.worker.stats import StepRecord, StepStats
from hocket.worker.step_log import StepLog


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

    def __init__(
        self,
        config: EngineConfig,
        mesh: Mesh,
        exchange: StepExchange,
        on_progress: OnProgress,
        time_limit: TimeLimit = unlimited,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.exchange = exchange
        self.runner = Runner(config, mesh, on_progress, time_limit)
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
        self._schemas = Schemas(config)
        self.stats = StepStats()
        self.log = StepLog(mesh.rank, config.overlap, self.scheduler.counters)
        self._digest = config.digest
        self._token_cost = TokenCost.of(config.model)
        self._step = 0
        self._peers_decode = False
        self._ended_at: float | None = None
        self._lock_step = mesh.ep_size > 1
        self._held: list[TokenOutput] = []
        self._held_batch: Batch | None = None
        self._running: InFlight | None = None  # launched, and not waited for yet
        self._failed_here = 0  # where this rank's last step failed, as the exchange carries it
        self._failure: StepFailure | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or self._running is not None

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. Raises CapacityError for one that can never fit."""
        for engine_request in requests:
            request = Request(engine_request)
            self._schemas.attach(request)
            self.scheduler.add(request)

    def abort(self, request_ids: list[str], reason: str = "abort") -> None:
        """End requests, counted under `reason`; unknown ids are ignored (they may just have finished)."""
        for request in self.scheduler.abort(request_ids):
            self.runner.forget(request.request_id)
            self.stats.count_finished(reason)

    def abort_all(self) -> None:
        """End every request."""
        self.abort(self.scheduler.request_ids())

    def set_thresholds(self, decode: int, prefill: int) -> None:
        """Split steps of so many tokens and more, from here on. All ranks before the same step."""
        overlap = replace(self.config.overlap, decode_token_threshold=decode, prefill_token_threshold=prefill)
        self.config = replace(self.config, overlap=overlap)
        self._digest = self.config.digest
        self.log.stop_watching()

    def step(self) -> tuple[list[TokenOutput], StepPlan]:
        """One step, together with all ranks. Returns what this rank's requests gained in the step before.

        A rank learns only in the next exchange whether a step failed on another one, so in lock-step outputs are held
        back until then; where one failed, its requests end on all ranks (`take_failure`). On a GPU the step before may
        still run until this one is launched.

        Raises:
            RankLost, StepDesync, BatonTimeout: another rank is late, gone or out of step, or a ubatch is stuck.
        """
        laps = Laps(self._ended_at)
        self._ended_at = None
        batch = self.scheduler.schedule(self._step, protect_decodes=self._peers_decode)
        column = vote.facts(
            batch,
            step=self._step,
            digest=self._digest,
            num_unfinished=int(self.scheduler.has_unfinished),
            graph_mode=int(bool(self.runner.graph_config.sizes)),
            refusal=self._refusal(batch),
            failure=self._failed_here,
            wish=self._wish(batch),
        )
        entered_at = laps.end("schedule")
        table = self.exchange.exchange(column)
        left_at = laps.end_exchange(table)
        if (recorder := self.runner.executor.recorder) is not None:
            recorder.number = self._step
            recorder.exchange_ns = round(entered_at * 1e9), round(left_at * 1e9)
        plan = vote.decide(table, self.config.overlap, self.config.graphs)
        self._step += 1
        self._peers_decode = plan.any_decodes
        if plan.failed is not None:
            self._drop(batch, plan.failed)
            self._account(StepRecord(plan, batch.phase))
            return [], plan
        record = StepRecord(plan, batch.phase, us=laps.us)
        before, self._running = self._running, None
        failure: UBatchFailed | None = None
        if not plan.is_idle:
            try:
                self._running = self._launch(batch, plan, before, record, laps)
            except UBatchFailed as error:
                failure = error
        ready, self._held, self._held_batch = self._held, [], None
        if before is not None:
            ready += self._finish(before, laps)
        if failure is not None:  # of what the step before did not end
            self._fail_here(batch, plan, failure)
            record.has_failed = True
        if self._running is not None and not self._running.can_wait:
            running, self._running = self._running, None
            outputs = self._finish(running, laps)
            if self._lock_step:
                self._held, self._held_batch = outputs, batch
            else:
                ready += outputs
        self._account(record)
        return ready, plan

    def _launch(
        self, batch: Batch, plan: StepPlan, before: InFlight | None, record: StepRecord, laps: Laps
    ) -> InFlight:
        """Run the model on this rank's batch as `plan` says, or begin to. Raises UBatchFailed where it failed here."""
        ubatches = self.runner.prepare(batch, plan, before)
        laps.end("prepare")
        record.ubatches = tuple((u.layout.num_tokens, u.layout.num_padded_max) for u in ubatches)
        if plan.graph_tokens:
            record.ubatches = plan.parts(self.mesh.ep_rank)
        try:
            return self.runner.launch(ubatches, batch, plan, before)
        finally:
            laps.end("forward")
            if not plan.graph_tokens:  # what a graph moves nobody counts
                record.times = self.runner.executor.times
                record.is_timed = self.runner.executor.times_transfers

    def _finish(self, step: InFlight, laps: Laps) -> list[TokenOutput]:
        """Wait for a launched step; what this rank's requests gained in it."""
        result = self.runner.finish(step)
        laps.end("sample")
        outputs = self._commit(step.batch, result)
        self._ended_at = laps.end("commit")
        return outputs

    def _account(self, record: StepRecord) -> None:
        """Every step passes here once, on every rank."""
        self.stats.count_step(record)
        ends_run = record.plan.is_finished if self._lock_step else not self.scheduler.has_unfinished
        if ends_run:
            self.stats.pace.interrupt()
        self.log.step(record, ends_run=ends_run)

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
        self._failed_here = error.code if self._lock_step else 0
        self._end_failed(batch, f"step {plan.step} failed on rank {self.mesh.rank}, {error}", is_cause=True)

    def _drop(self, batch: Batch, failed: tuple[int, FailedStage]) -> None:
        """The step before failed somewhere: what is held of it is worthless, and `batch`, built on it, must wait."""
        held, self._held, self._held_batch = self._held_batch, [], None
        if self._running is not None:
            held, self._running = self._running.batch, None
        if held is not None and not self._failed_here:
            self._end_failed(held, f"the step before failed on rank {failed[0]}, {failed[1]}", is_cause=False)
            self.stats.failed += 1
        self._failed_here = 0
        self.scheduler.retract(batch)

    def _end_failed(self, batch: Batch, message: str, *, is_cause: bool) -> None:
        ids = [request.request_id for request in self.scheduler.fail(batch)]
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
                    queue_s=request.admitted_at - request.queued_at if request.num_output_tokens == 1 else 0.0,
                )
            )
            if request.finish_reason is not None:
                self.stats.count_finished(request.finish_reason)
        self.stats.prompt_tokens += batch.num_prefill_tokens
        self.stats.generated_tokens += len(outputs)
        self.log.count_tokens(batch.num_prefill_tokens, len(outputs))
        return outputs

    def counters(self) -> dict[str, Any]:
        """Sums of this rank's steps and of its scheduler, and the load of experts as far as it was sampled, as plain
        values. The first call begins to sample."""
        load = {"expert_load": self.runner.expert_load.snapshot()}
        return self.stats.totals() | asdict(self.scheduler.counters()) | load

    def close(self) -> None:
        """All ranks together. Raises RankLost where one does not come, and others would wait for it."""
        self.log.close()
        if self.runner.closes_together:
            self.exchange.exchange([0] * vote.NUM_ROWS)
            self.mesh.record.enter(CLOSES)
        self.runner.close()
        self.exchange.close()
