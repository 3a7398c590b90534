"""What a step of the largest batch needs beside weights and cache, found by running one. Knows no users' requests.

All ranks of an expert group must run it together: it goes through every layer's collectives.
"""

from __future__ import annotations

import torch

from hocket.cache.storage import allocate_kv_caches
from hocket.config.engine import EngineConfig
from hocket.models.base import CausalLM
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, BatchBuilder
from hocket.worker.inputs import build_inputs


def step_bytes(model: CausalLM, config: EngineConfig, device: torch.device) -> int:
    """Most bytes that a step of max_num_batched_tokens takes on the GPU `device` while it runs, logits included."""
    batch = largest_batch(config)
    size, dtype = config.cache.block_size, getattr(torch, config.dtype)
    inputs = build_inputs(batch, batch.num_tokens, size, device)
    num_blocks = sum(len(row.block_ids) for row in batch.requests)
    cache = allocate_kv_caches(config.model, num_blocks, size, dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = model(inputs, cache)
    model.compute_logits(hidden[: config.scheduler.max_num_seqs]).softmax(dim=-1)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def largest_batch(config: EngineConfig) -> Batch:
    """As many tokens as a step may have, in prompts as long as the model allows."""
    size, num_tokens = config.cache.block_size, config.scheduler.max_num_batched_tokens
    longest = min(config.scheduler.max_model_len, num_tokens)
    builder, num_blocks = BatchBuilder(num_tokens), 0
    while builder.budget:
        done, length = num_tokens - builder.budget, min(longest, builder.budget)
        token_ids = [token % config.model.vocab_size for token in range(done, done + length)]
        request = Request(EngineRequest(f"largest-{done}", token_ids, SamplingParams()))
        request.block_ids = list(range(num_blocks, num_blocks + -(-length // size)))
        num_blocks = request.block_ids[-1] + 1
        builder.add(request, length, is_prefill=True)
    return builder.build()
