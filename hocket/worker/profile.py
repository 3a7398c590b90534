"""What a step of the largest batch needs beside weights and cache, found by running one. Knows no users' requests.

All ranks of an expert group must run it together: it goes through every layer's collectives.
"""

from __future__ import annotations

from itertools import cycle

import torch

from hocket.cache.storage import allocate_kv_caches
from hocket.config.engine import EngineConfig
from hocket.models.base import CausalLM
from hocket.scheduler.batch import Batch
from hocket.worker.inputs import build_inputs
from hocket.worker.made_batch import made_batch, num_blocks_of, prompt_lens


def step_bytes(model: CausalLM, config: EngineConfig, device: torch.device) -> int:
    """Most bytes that a step of max_num_batched_tokens takes on the GPU `device` while it runs, logits included."""
    batch = largest_batch(config)
    size, dtype = config.cache.block_size, getattr(torch, config.dtype)
    inputs = build_inputs(batch, batch.num_tokens, size, device)
    cache = allocate_kv_caches(config.model, num_blocks_of(batch), size, dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = model(inputs, cache)
    model.compute_logits(hidden[: config.scheduler.max_num_seqs]).softmax(dim=-1)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def largest_batch(config: EngineConfig) -> Batch:
    """As many tokens as a step may have, in prompts as long as the model allows."""
    num_tokens = config.scheduler.max_num_batched_tokens
    lens = prompt_lens(num_tokens, min(config.scheduler.max_model_len, num_tokens))
    return made_batch(lens, cycle(range(config.model.vocab_size)), config.cache.block_size)
