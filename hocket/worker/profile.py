"""What steps of the largest batches need beside weights and cache, found by running some. Knows no users' requests.

All ranks of an expert group must run them together: they go through every layer's collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor

from hocket.cache.storage import allocate_kv_caches
from hocket.config.engine import EngineConfig
from hocket.errors import CapacityError
from hocket.models.base import CausalLM
from hocket.overlap.executor import UBatchExecutor
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import join, split_inputs
from hocket.scheduler.batch import Batch
from hocket.worker.capture import TimeLimit, out_of_memory
from hocket.worker.inputs import build_inputs
from hocket.worker.made_batch import blocks_taken, made_batch, prompt_lens
from hocket.worker.memory import available_bytes


def step_bytes(
    model: CausalLM,
    executor: UBatchExecutor,
    config: EngineConfig,
    device: torch.device,
    time_limit: TimeLimit,
    on_progress: Callable[[int, int], None],
) -> int:
    """Most bytes that a step of max_num_batched_tokens takes on the GPU `device` while it runs, logits included.

    Where steps are split, it also runs as ubatches, and smaller ones do: all kernels of ubatches are compiled then.

    Raises:
        CapacityError: the memory does not suffice for one; what it took and asked for, what was free, what to lower.
    """
    size, dtype = config.cache.block_size, getattr(torch, config.dtype)
    largest = batch_of(config, config.scheduler.max_num_batched_tokens)
    cache = allocate_kv_caches(config.model, blocks_taken(largest), size, dtype, device)

    def whole(batch: Batch) -> list[Tensor]:
        return [model(build_inputs(batch, batch.num_tokens, size, device), cache)]

    def split(batch: Batch) -> list[Tensor]:
        bounds = equal_bounds(batch.num_tokens, config.overlap.num_ubatches)
        cut = cut_batch([row.num_tokens for row in batch.requests], bounds)
        return executor.run(split_inputs(build_inputs(batch, batch.num_tokens, size, device), cut), cache, "prefill")

    def peak_bytes(run: Callable[[Batch], list[Tensor]], batch: Batch) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with room_for(batch.num_tokens, available_bytes(device), before):
            model.compute_logits(join(run(batch))[: config.scheduler.max_num_seqs]).softmax(dim=-1)
            torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    needed, sizes = peak_bytes(whole, largest), split_sizes(config)
    for done, num_tokens in enumerate(sizes):
        on_progress(done, len(sizes))
        what = f"compiling what a step of {num_tokens} tokens in {config.overlap.num_ubatches} ubatches runs"
        with time_limit(what), executor.patient(config.graphs.capture_timeout_s):
            needed = max(needed, peak_bytes(split, batch_of(config, num_tokens)))
    return needed


@contextmanager
def room_for(num_tokens: int, free_bytes: int, allocated_bytes: int) -> Iterator[None]:
    """Where the GPU's memory does not suffice for the step that runs inside, say so in one line. free_bytes,
    allocated_bytes: before it.

    Raises:
        CapacityError: needed, with what its transfers fill, and free bytes, and what to lower.
    """
    try:
        yield
    except Exception as error:
        if (found := out_of_memory(error)) is None:
            raise
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(found))
        taken = torch.cuda.max_memory_allocated() - allocated_bytes
        needed = f"needs {taken:,} bytes" + (f" and {asked[1]} more" if asked else " and more")
        raise CapacityError(
            f"a step of {num_tokens} tokens, with the buffers of its transfers, {needed}, "
            f"and {free_bytes:,} bytes were free before it: lower --max-num-batched-tokens"
        ) from error


def split_sizes(config: EngineConfig) -> list[int]:
    """Tokens of prefill steps that differ in their kernels: the most there can be, half of that, and so on to the least
    that is split; none where no step is."""
    overlap = config.overlap
    least = overlap.num_ubatches if overlap.force_split else overlap.prefill_token_threshold
    found, size = [], config.scheduler.max_num_batched_tokens
    while overlap.num_ubatches > 1 and size >= least:
        found.append(size)
        size //= 2
    return found


def batch_of(config: EngineConfig, num_tokens: int) -> Batch:
    """So many tokens, in prompts as long as the model allows."""
    lens = prompt_lens(num_tokens, min(config.scheduler.max_model_len, num_tokens))
    return made_batch(lens, cycle(range(config.model.vocab_size)), config.cache.block_size)
