"""One rank's model at work: KV cache, graphs, and executing a batch. Knows nothing of scheduling or of the front."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hocket.cache.storage import allocate_kv_caches, bytes_per_block
from hocket.channel.messages import States
from hocket.config.engine import EngineConfig
from hocket.dist.mesh import Mesh
from hocket.dist.watchdog import last_resort
from hocket.errors import HocketError
from hocket.host import sent
from hocket.models.base import UBatchInputs
from hocket.moe.layer import MoELayer
from hocket.overlap.executor import UBatchExecutor
from hocket.overlap.slices import cut_batch
from hocket.overlap.sm_limits import budget_of
from hocket.overlap.views import join, split_inputs
from hocket.overlap.vote import StepPlan
from hocket.scheduler.batch import Batch
from hocket.startup import GRAPHS, KV_CACHE, WEIGHTS, Phases
from hocket.ubatch.stamps import record_replay
from hocket.worker import split_worth
from hocket.worker.build import OnProgress, build, graph_config
from hocket.worker.capture import TimeLimit
from hocket.worker.expert_load import ExpertLoad
from hocket.worker.graphs import DecodeGraphs, Parts
from hocket.worker.in_flight import HostIds, InFlight, StepResult
from hocket.worker.inputs import HostInputs, build_inputs
from hocket.worker.memory import available_bytes, num_cache_blocks
from hocket.worker.profile import profiled
from hocket.worker.prompt_logprobs import PromptLogprobs
from hocket.worker.sampler import Sampler, needs_history
from hocket.worker.state_record import StateRecord


class Runner:
    """Has the model made (`build.py`) and runs batches through it."""

    def __init__(self, config: EngineConfig, mesh: Mesh, on_progress: OnProgress, time_limit: TimeLimit) -> None:
        self.config = config
        self.mesh = mesh
        self._phases = Phases()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(mesh.node_ranks)))
        built = build(config, mesh, on_progress)
        self._phases.end(WEIGHTS)
        self.model = built.model
        self.experts_backends = ", ".join(backend.name for backend in built.experts)
        self.load_report = built.load_report
        self._transport = built.transport
        self.expert_load = ExpertLoad([module for module in self.model.modules() if isinstance(module, MoELayer)])
        self.sampler = Sampler()
        self.waits_for_device = False  # read by the watchdog's thread
        self._prompt_logprobs = PromptLogprobs()
        self._states: StateRecord | None = None
        self._last_ids: Tensor | None = None
        self.graphs = DecodeGraphs()
        self.graph_config = graph_config(config, mesh, built)
        overlap = config.overlap
        self.executor = UBatchExecutor(
            self.model,
            overlap.executor,
            overlap.num_ubatches,
            config.step_timeout_s,
            mesh.device,
            mesh.record,
            budget_of(self.model, built.sender, config, mesh.device),
        )
        try:
            self._allocate(on_progress, time_limit)
            self._phases.end(KV_CACHE)
            self._capture(on_progress, time_limit)
            self._phases.end(GRAPHS)
        except BaseException:
            self.executor.close()
            raise

    def _allocate(self, on_progress: OnProgress, time_limit: TimeLimit) -> None:
        """The KV cache, and the ids that the last step sampled, where the next one may need them."""
        config, device, block_size = self.config, self.mesh.device, self.config.cache.block_size
        dtype = getattr(torch, config.dtype)
        block_bytes = bytes_per_block(config.model, dtype, block_size)
        free_bytes = self._free_bytes(on_progress, time_limit)
        self.num_blocks = num_cache_blocks(config, block_bytes, free_bytes, self._ranks_per_device())
        self.cache_bytes = self.num_blocks * block_bytes
        num_allocated = self.num_blocks + bool(self.graph_config.sizes)  # the last one is the padding rows'
        self.kv_caches = allocate_kv_caches(config.model, num_allocated, block_size, dtype, device)
        if config.async_scheduling or self.graph_config.sizes:
            self._last_ids = torch.zeros(config.scheduler.max_num_seqs, dtype=torch.int64, device=device)

    def _capture(self, on_progress: OnProgress, time_limit: TimeLimit) -> None:
        """The graphs, if any; rank 0 says where splitting a decode takes longer than not to."""
        if not self.graph_config.sizes:
            return
        assert self._last_ids is not None
        parts = Parts(
            rank=self.mesh.rank,
            model=self.model,
            kv_caches=self.kv_caches,
            max_model_len=self.config.scheduler.max_model_len,
            last_ids=self._last_ids,
            executor=self.executor,
            num_ubatches=self.config.overlap.num_ubatches,
        )
        self.graphs.capture(parts, self.graph_config, time_limit, partial(on_progress, "capture"))
        if sizes := self.graph_config.split_sizes:
            compared = split_worth.compare(self.graphs, parts, sizes, time_limit, partial(on_progress, "compare"))
            if self.mesh.rank == 0:
                split_worth.say(compared, parts.num_ubatches, split_worth.context_of(parts.max_model_len))

    def _free_bytes(self, on_progress: OnProgress, time_limit: TimeLimit) -> int:
        """What the KV cache may take a share of: on a GPU what the largest step leaves."""
        device = self.mesh.device
        if device.type == "cpu":
            return available_bytes(device)
        progress = partial(on_progress, "warm up")
        found = profiled(self.model, self.executor, self.config, self.graph_config, device, time_limit, progress)
        if self.mesh.rank == 0:
            split_worth.say_launched(found.compared, self.config)
        torch.cuda.empty_cache()
        return available_bytes(device) - found.num_bytes

    def _ranks_per_device(self) -> int:
        return len(self.mesh.node_ranks) if self.mesh.device.type == "cpu" else 1

    def prepare(self, batch: Batch, plan: StepPlan, before: InFlight | None) -> tuple[UBatchInputs, ...]:
        """The model's input for `batch`, one part per ubatch of `plan`; none where a graph has its own.

        before: the step whose sampled ids are not known on the host yet, if so.
        """
        if plan.graph_tokens:
            return ()
        whole = build_inputs(
            batch,
            plan.num_tokens_max,
            self.config.cache.block_size,
            self.mesh.device,
            None if before is None else before.sources,
            self._last_ids,
        )
        if plan.num_ubatches == 1:
            return (whole,)
        lens = [r.num_tokens for r in batch.requests]
        return split_inputs(whole, cut_batch(lens, plan.bounds, plan.own_bounds(self.mesh.ep_rank)))

    def launch(
        self, ubatches: tuple[UBatchInputs, ...], batch: Batch, plan: StepPlan, before: InFlight | None
    ) -> InFlight:
        """Run the model (all ranks of the expert group together) and sample. On a GPU all of it is only queued.

        Raises:
            UBatchFailed: see UBatchExecutor.run.
        """
        rows = [scheduled for scheduled in batch.requests if scheduled.needs_sample]
        ids, prompt_logits = None, None
        if plan.graph_tokens:
            logits, ids = self._replay(batch, plan, before)
        else:
            logits, prompt_logits = self._forward(ubatches, batch, plan)
        if ids is None or any(not row.request.params.is_greedy or needs_history(row.request) for row in rows):
            lengths = [row.start + row.num_tokens - row.request.num_prompt_tokens for row in rows]
            ids = self.sampler.launch(logits, [row.request for row in rows], lengths)
        can_wait = self.config.async_scheduling and not any(needs_history(row.request) for row in batch.requests)
        return InFlight(batch, rows, logits, prompt_logits, self._to_host(ids), can_wait)

    def _replay(self, batch: Batch, plan: StepPlan, before: InFlight | None) -> tuple[Tensor, Tensor]:
        """Logits fp32 [N, V] and greedy ids [N] of the batch's rows, until the next replay."""
        graph = self.graphs[plan.graph_tokens, plan.num_ubatches]
        sources = None if before is None else before.sources
        inputs = HostInputs.of(batch, self.config.cache.block_size, sources)
        if (recorder := self.executor.recorder) is None:
            graph.replay(inputs)
        else:
            with record_replay(recorder, self.mesh.device, plan.num_ubatches, batch.num_tokens):
                graph.replay(inputs)
        return graph.logits[: batch.num_tokens], graph.ids[: batch.num_tokens]

    def _forward(
        self, ubatches: tuple[UBatchInputs, ...], batch: Batch, plan: StepPlan
    ) -> tuple[Tensor, Tensor | None]:
        """fp32 logits [N, V] of the rows that are sampled from, in batch order, and of the rows whose prompt
        log-probabilities are asked for (None: none are).
        """
        if self._states is not None:
            self._states.begin_step(batch, ubatches)
        self.expert_load.begin_step(plan.step)
        hidden = join(self.executor.run(ubatches, self.kv_caches, "decode" if plan.uniform_query else "prefill"))
        starts = [0, *accumulate(scheduled.num_tokens for scheduled in batch.requests)]
        ends = zip(starts[1:], batch.requests, strict=True)
        rows = [end - 1 for end, scheduled in ends if scheduled.needs_sample]
        sampled = hidden
        if len(rows) != hidden.shape[0]:
            sampled = hidden[sent(rows, torch.int64, hidden.device)]
        logits = self.model.compute_logits(sampled)
        prompt_rows = self._prompt_logprobs.rows(batch, starts)
        if not prompt_rows:
            return logits, None
        picked = hidden[sent(prompt_rows, torch.int64, hidden.device)]
        return logits, self.model.compute_logits(picked)

    def _to_host(self, ids: Tensor) -> HostIds:
        """Keep ids for the next step, and begin to copy them to the host."""
        if self._last_ids is not None:
            self._last_ids[: len(ids)] = ids.clamp(min=0)  # a row that is not finite goes on until the host knows
        return HostIds(ids)

    def finish(self, step: InFlight) -> StepResult:
        """Wait for what a step sampled; with log-probabilities.

        Raises:
            HocketError: logits were not finite; names the request.
        """
        self.waits_for_device = True
        token_ids = step.ids.wait()
        self.waits_for_device = False
        if self._states is not None:
            token_ids = self._states.forced(step.rows, token_ids)
        sampled = self.sampler.finish(step.logits, token_ids, [row.request for row in step.rows])
        ids, logprobs = iter(sampled.token_ids), iter(sampled.logprobs)
        requests = step.batch.requests
        return StepResult(
            token_ids=[next(ids) if s.needs_sample else None for s in requests],
            logprobs=[next(logprobs) if s.needs_sample else None for s in requests],
            prompt_logprobs=self._prompt_logprobs.collect(step.batch, step.prompt_logits),
        )

    def record_states(self, forced: Mapping[str, list[int]]) -> None:
        """Keep hidden states from now on (of steps that are no graph's), and give requests the tokens of `forced`."""
        self._states = StateRecord(self.model, forced)

    def states_of(self, layer: int) -> States:
        """What is kept of a layer. Raises HocketError where nothing is."""
        if self._states is None:
            raise HocketError("the states of a layer were asked for, and none are kept")
        return self._states.layer(layer, self.mesh.rank)

    def info(self) -> dict[str, Any]:
        """What the start-up summary says of this rank."""
        shares = self.executor.budget.shares
        return {
            "num_blocks": self.num_blocks,
            "cache_bytes": self.cache_bytes,
            "loaded_bytes": self.load_report.bytes_read,
            "load_seconds": self.load_report.seconds,
            "startup_s": self._phases.seconds,
            "num_threads": torch.get_num_threads(),
            "moe_backend": self.experts_backends,
            "device": self.config.device,
            "attention_backend": self.model.backends.attention.name,
            "sms": shares and asdict(shares),
            "graphs": {
                "sizes": list(self.graph_config.sizes),
                "split_sizes": list(self.graph_config.split_sizes),
                "seconds": self.graphs.seconds,
                "bytes": self.graphs.num_bytes,
            },
        }

    def close(self) -> None:
        """End the ubatch workers, and give back what transfers took. All ranks together.

        Where that waits for all of them it ends this process after a step's limit.
        """
        self.executor.close()
        with last_resort(self.config.step_timeout_s) if self.closes_together else nullcontext():
            self._transport.close()

    @property
    def closes_together(self) -> bool:
        """Whether `close` waits for all ranks."""
        return self._transport.closes_together

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended early."""
        self._prompt_logprobs.forget(request_id)
