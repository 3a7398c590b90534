"""What a step of the largest batch needs beside weights and cache, found by running one. Knows no requests.

All ranks of an expert group must run it together: it goes through every layer's collectives.
"""

from __future__ import annotations

import torch

from hocket.attention.base import AttentionMetadata
from hocket.cache.storage import allocate_kv_caches
from hocket.config.engine import EngineConfig
from hocket.models.base import CausalLM, UBatchInputs
from hocket.moe.base import TokenLayout


def step_bytes(model: CausalLM, config: EngineConfig, device: torch.device) -> int:
    """Most bytes that a step of max_num_batched_tokens takes on the GPU `device` while it runs, logits included."""
    inputs = _largest(config, device)
    size, dtype = config.cache.block_size, getattr(torch, config.dtype)
    num_blocks = int(inputs.attention.block_table.max()) + 1
    cache = allocate_kv_caches(config.model, num_blocks, size, dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = model(inputs, cache)
    model.compute_logits(hidden[: config.scheduler.max_num_seqs]).softmax(dim=-1)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _largest(config: EngineConfig, device: torch.device) -> UBatchInputs:
    """As many tokens as a step may have, in prompts as long as the model allows."""
    size, num_tokens = config.cache.block_size, config.scheduler.max_num_batched_tokens
    longest = min(config.scheduler.max_model_len, num_tokens)
    lens = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    per_request = -(-longest // size)
    blocks = torch.arange(len(lens) * per_request, dtype=torch.int32, device=device).view(len(lens), per_request)
    positions = torch.cat([torch.arange(length, device=device) for length in lens])
    request = torch.repeat_interleave(torch.tensor(lens, device=device))
    slots = blocks.long()[request, positions // size] * size + positions % size
    attention = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=blocks,
        slot_mapping=slots,
        query_start_loc_cpu=tuple(starts),
        seq_lens_cpu=tuple(lens),
        max_query_len=max(lens),
        max_seq_len=max(lens),
        num_tokens=num_tokens,
    )
    layout = TokenLayout.of(num_tokens, num_tokens, num_tokens, device)
    ids = torch.arange(num_tokens, device=device) % config.model.vocab_size
    return UBatchInputs(token_ids=ids, positions=positions, attention=attention, layout=layout)
