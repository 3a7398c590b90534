"""What steps of the largest batches need beside weights and cache, and what they take whole and as ubatches, found by
running some. Knows no users' requests.

All ranks of an expert group must run them together: they go through every layer's collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from hocket.cache.storage import allocate_kv_caches
from hocket.config.engine import EngineConfig
from hocket.config.graphs import GraphConfig, fitting_size
from hocket.errors import CapacityError
from hocket.models.base import CausalLM
from hocket.overlap.executor import UBatchExecutor
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import join, split_inputs
from hocket.scheduler.batch import Batch
from hocket.worker.capture import TimeLimit, device_us, out_of_memory
from hocket.worker.inputs import build_inputs
from hocket.worker.made_batch import blocks_taken, decode_lens, made_batch, prompt_lens
from hocket.worker.memory import available_bytes
from hocket.worker.split_worth import Compared, context_of, in_turn


@dataclass(frozen=True)
class Profile:
    """num_bytes: most that a step of max_num_batched_tokens takes on the GPU while it runs, logits included.

    compared: where steps are launched as ubatches, by phase, from the fewest tokens on.
    """

    num_bytes: int
    compared: dict[str, list[Compared]]


def profiled(
    model: CausalLM,
    executor: UBatchExecutor,
    config: EngineConfig,
    graphs: GraphConfig,
    device: torch.device,
    time_limit: TimeLimit,
    on_progress: Callable[[int, int], None],
) -> Profile:
    """Run the largest step; where steps are split also as ubatches, and smaller ones, and decodes that no graph is
    replayed for: all kernels of ubatches are compiled then. graphs: what will be captured.

    They are timed whole and as ubatches too, but for forced ones, and not over an emulated link, which may be so slow
    that the start would take long.

    Raises:
        CapacityError: the memory does not suffice for one; what it took and asked for, what was free, what to lower.
    """
    size, dtype = config.cache.block_size, getattr(torch, config.dtype)
    largest = batch_of(config, "prefill", config.scheduler.max_num_batched_tokens)
    num_blocks = blocks_taken(largest)
    cache = allocate_kv_caches(config.model, num_blocks, size, dtype, device)

    def whole(batch: Batch) -> list[Tensor]:
        return [model(build_inputs(batch, batch.num_tokens, size, device), cache)]

    def split(batch: Batch) -> list[Tensor]:
        """As the engine does."""
        bounds = equal_bounds(batch.num_tokens, config.overlap.num_ubatches)
        cut = cut_batch([row.num_tokens for row in batch.requests], bounds)
        parts = split_inputs(build_inputs(batch, batch.num_tokens, size, device), cut)
        return executor.run(parts, cache, "decode" if batch.uniform_query else "prefill")

    def peak_bytes(run: Callable[[Batch], list[Tensor]], batch: Batch) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with room_for(batch.num_tokens, available_bytes(device), before):
            model.compute_logits(join(run(batch))[: config.scheduler.max_num_seqs]).softmax(dim=-1)
            torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    def compared(batch: Batch) -> Compared:
        whole(batch)  # compiles what it runs
        works = partial(whole, batch), partial(split, batch)
        return in_turn(batch.num_tokens, *(partial(device_us, work, 1) for work in works))

    needed, steps = peak_bytes(whole, largest), split_steps(config, graphs)
    found: dict[str, list[Compared]] = {}
    are_compared = not config.overlap.force_split and config.parallel.emulated_link is None
    for done, (phase, num_tokens) in enumerate(steps):
        on_progress(done, len(steps))
        batch = batch_of(config, phase, num_tokens, num_blocks)
        step = f"a {phase} of {num_tokens} tokens in {config.overlap.num_ubatches} ubatches"
        with executor.patient(config.graphs.capture_timeout_s):
            with time_limit(f"compiling what {step} runs"):
                needed = max(needed, peak_bytes(split, batch))
            if are_compared:
                with time_limit(f"timing {step} and whole"):
                    found.setdefault(phase, []).insert(0, compared(batch))
    return Profile(needed, found)


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


def split_steps(config: EngineConfig, graphs: GraphConfig) -> list[tuple[str, int]]:
    """(phase, tokens) of steps that are launched as ubatches and differ in their kernels: of each phase the most tokens
    there can be, half of that, and so on to the least that is split; none where no step is, and no decodes that replay
    a graph."""
    overlap, limits = config.overlap, config.scheduler
    if overlap.num_ubatches == 1:
        return []
    sizes = {
        "prefill": (limits.max_num_batched_tokens, overlap.prefill_token_threshold),
        "decode": (limits.max_num_seqs, overlap.decode_token_threshold),
    }
    found = []
    for phase, (size, threshold) in sizes.items():
        least = overlap.num_ubatches if overlap.force_split else threshold
        while size >= least:
            if phase == "prefill" or not _replays(config, graphs, size):
                found.append((phase, size))
            size //= 2
    return found


def _replays(config: EngineConfig, graphs: GraphConfig, num_requests: int) -> bool:
    """Whether a decode of so many replays a graph: without one of its ubatches that of the whole step, unless every
    step must be split (`vote.decide`)."""
    size = fitting_size(graphs.sizes, num_requests)
    return size in graphs.split_sizes or (size > 0 and not config.overlap.force_split)


def batch_of(config: EngineConfig, phase: str, num_tokens: int, most_blocks: int | None = None) -> Batch:
    """So many tokens: of prompts as long as the model allows, or of as many decodes in contexts of `context_of`. They
    share the first most_blocks."""
    lens = decode_lens(num_tokens, context_of(config.scheduler.max_model_len))
    if phase == "prefill":
        lens = prompt_lens(num_tokens, min(config.scheduler.max_model_len, num_tokens))
    return made_batch(lens, cycle(range(config.model.vocab_size)), config.cache.block_size, most_blocks)
