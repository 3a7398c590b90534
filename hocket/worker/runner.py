"""One rank's model: weights, KV cache, and executing a batch. Knows nothing of scheduling or of the front."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from hocket.cache.storage import allocate_kv_caches, bytes_per_block
from hocket.config.engine import EngineConfig
from hocket.dist.mesh import Mesh
from hocket.models.backends import backends_for, check_batch_invariance
from hocket.models.base import CausalLM, UBatchInputs
from hocket.models.loader import LoadReport, dummy_weights, load_weights
from hocket.models.registry import build_model
from hocket.moe.factory import MoEFactory
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.outputs import TokenLogprobs
from hocket.overlap.executor import UBatchExecutor
from hocket.overlap.slices import cut_batch
from hocket.overlap.views import join, split_inputs
from hocket.overlap.vote import StepPlan
from hocket.scheduler.batch import Batch
from hocket.worker.inputs import build_inputs
from hocket.worker.memory import available_bytes, num_cache_blocks
from hocket.worker.profile import step_bytes
from hocket.worker.sampler import Sampler, prompt_logprobs

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]


@dataclass
class StepResult:
    """What executing a batch gave, aligned with `batch.requests`: None where the step did not end in a sample."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[str, list[TokenLogprobs | None]]


class Runner:
    """Builds the model and runs batches through it."""

    def __init__(self, config: EngineConfig, mesh: Mesh, on_progress: OnProgress) -> None:
        self.config = config
        self.mesh = mesh
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(mesh.node_ranks)))
        dtype = getattr(torch, config.dtype)
        placement = ExpertPlacement(
            config.model.moe.num_experts, mesh.ep_size, config.parallel.expert_placement_strategy
        )
        factory = MoEFactory(mesh, placement, config.parallel.all2all_backend, config.moe_backend)
        link = config.parallel.emulated_link
        if link is not None:
            factory.transport = LinkEmulator(factory.transport, link.latency_us, link.gb_per_s)
        backends = backends_for(config.attention_backend, config.deterministic, mesh.device)
        self.model: CausalLM = build_model(config.model, factory, mesh.device, dtype, backends)
        self.experts_backends = factory.experts_backends
        self.load_report = self._load(placement, on_progress)
        if config.deterministic:
            check_batch_invariance(self.model, backends.kernels)
        block_bytes = bytes_per_block(config.model, dtype, config.cache.block_size)
        self.num_blocks = num_cache_blocks(config, block_bytes, self._free_bytes(), self._ranks_per_device())
        self.cache_bytes = self.num_blocks * block_bytes
        self.kv_caches = allocate_kv_caches(config.model, self.num_blocks, config.cache.block_size, dtype, mesh.device)
        overlap = config.overlap
        self.executor = UBatchExecutor(
            self.model, overlap.executor, overlap.num_ubatches, config.step_timeout_s, mesh.device, mesh.record
        )
        self.sampler = Sampler()
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}

    def _load(self, placement: ExpertPlacement, on_progress: OnProgress) -> LoadReport:
        if self.config.load_format == "dummy":
            return dummy_weights(self.model, self.config.seed)
        return load_weights(
            self.model, self.config.model_path, on_progress=lambda done, total: on_progress("load", done, total)
        )

    def _free_bytes(self) -> int:
        """What the KV cache may take a share of: on a GPU what the largest step leaves."""
        device = self.mesh.device
        if device.type == "cpu":
            return available_bytes(device)
        needed = step_bytes(self.model, self.config, device)
        torch.cuda.empty_cache()
        return available_bytes(device) - needed

    def _ranks_per_device(self) -> int:
        return len(self.mesh.node_ranks) if self.mesh.device.type == "cpu" else 1

    def prepare(self, batch: Batch, plan: StepPlan) -> tuple[UBatchInputs, ...]:
        """The model's input for `batch`, one part per ubatch of `plan`."""
        whole = build_inputs(batch, plan.num_tokens_max, self.config.cache.block_size, self.mesh.device)
        if plan.num_ubatches == 1:
            return (whole,)
        lens = [r.num_tokens for r in batch.requests]
        return split_inputs(whole, cut_batch(lens, plan.bounds, plan.own_bounds(self.mesh.ep_rank)))

    def forward(
        self, ubatches: tuple[UBatchInputs, ...], batch: Batch, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model (all ranks of the expert group together).

        Returns fp32 logits [N, V] of the rows that are sampled from, in batch order, and of the rows whose prompt
        log-probabilities are asked for (None: none are).
        """
        hidden = join(self.executor.run(ubatches, self.kv_caches, "decode" if plan.uniform_query else "prefill"))
        starts = [0, *accumulate(scheduled.num_tokens for scheduled in batch.requests)]
        ends = zip(starts[1:], batch.requests, strict=True)
        rows = [end - 1 for end, scheduled in ends if scheduled.needs_sample]
        if len(rows) != hidden.shape[0]:
            sampled = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        else:
            sampled = hidden
        logits = self.model.compute_logits(sampled)
        prompt_rows = self._prompt_rows(starts, batch)
        if not prompt_rows:
            return logits, None
        picked = hidden[torch.tensor(prompt_rows, dtype=torch.int64, device=hidden.device)]
        return logits, self.model.compute_logits(picked)

    def _prompt_rows(self, starts: list[int], batch: Batch) -> list[int]:
        """Rows whose logits predict a prompt token of a request that wants prompt log-probabilities."""
        rows: list[int] = []
        for begin, scheduled in zip(starts, batch.requests, strict=False):
            request = scheduled.request
            if request.params.prompt_logprobs is not None and request.num_output_tokens == 0:
                last = min(scheduled.start + scheduled.num_tokens, request.num_prompt_tokens - 1)
                rows += range(begin, begin + max(last - scheduled.start, 0))
        return rows

    def sample(self, batch: Batch, logits: torch.Tensor, prompt_logits: torch.Tensor | None) -> StepResult:
        """Sample one token for every row of `logits`, and collect prompt log-probabilities."""
        asking = [s.request for s in batch.requests if s.needs_sample]
        sampled = self.sampler.sample(logits, asking)
        ids = iter(sampled.token_ids)
        logprobs = iter(sampled.logprobs)
        return StepResult(
            token_ids=[next(ids) if s.needs_sample else None for s in batch.requests],
            logprobs=[next(logprobs) if s.needs_sample else None for s in batch.requests],
            prompt_logprobs=self._collect_prompt_logprobs(batch, prompt_logits),
        )

    def _collect_prompt_logprobs(
        self, batch: Batch, logits: torch.Tensor | None
    ) -> dict[str, list[TokenLogprobs | None]]:
        done: dict[str, list[TokenLogprobs | None]] = {}
        taken = 0
        for scheduled in batch.requests:
            request = scheduled.request
            wanted = request.params.prompt_logprobs
            if wanted is None or request.num_output_tokens > 0:
                continue
            found = self._prompt_logprobs.setdefault(request.request_id, [None])
            del found[scheduled.start + 1 :]  # a preempted request starts again
            last = min(scheduled.start + scheduled.num_tokens, request.num_prompt_tokens - 1)
            count = max(last - scheduled.start, 0)
            if count and logits is not None:
                targets = request.prompt_token_ids[scheduled.start + 1 : last + 1]
                found += prompt_logprobs(logits[taken : taken + count], targets, wanted)
                taken += count
            if scheduled.needs_sample:
                done[request.request_id] = self._prompt_logprobs.pop(request.request_id)
        return done

    def info(self) -> dict[str, Any]:
        """What the start-up summary says of this rank."""
        return {
            "num_blocks": self.num_blocks,
            "cache_bytes": self.cache_bytes,
            "loaded_bytes": self.load_report.bytes_read,
            "load_seconds": self.load_report.seconds,
            "num_threads": torch.get_num_threads(),
            "moe_backend": self.experts_backends,
            "device": self.config.device,
        }

    def close(self) -> None:
        """End the ubatch workers."""
        self.executor.close()

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended early."""
        self._prompt_logprobs.pop(request_id, None)
