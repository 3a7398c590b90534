"""Turns a scheduled batch into the tensors the model reads. Knows nothing of models, sampling or other ranks' data.

Legend: T tokens of this step, R requests, B blocks of the longest request.
"""

from __future__ import annotations

import numpy as np
import torch

from hocket.attention.base import AttentionMetadata
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.scheduler.batch import Batch


def build_inputs(batch: Batch, num_padded_max: int, block_size: int, device: torch.device) -> UBatchInputs:
    """The whole batch as one UBatchInputs: token ids and positions int64 [T], attention metadata, token layout.

    num_padded_max: tokens of the rank that has most.
    """
    requests = batch.requests
    lens = np.fromiter((r.num_tokens for r in requests), dtype=np.int64, count=len(requests))
    starts = np.fromiter((r.start for r in requests), dtype=np.int64, count=len(requests))
    query_start = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(lens, out=query_start[1:])
    seq_lens = (starts + lens).astype(np.int32)
    num_tokens = int(query_start[-1])

    row = np.repeat(np.arange(len(requests)), lens)
    positions = np.arange(num_tokens, dtype=np.int64) - np.repeat(query_start[:-1], lens) + np.repeat(starts, lens)
    blocks = _block_table(batch, seq_lens, block_size)
    block_table = torch.from_numpy(blocks)
    slots = blocks[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    attention = AttentionMetadata(
        query_start_loc=_tensor(query_start, device),
        seq_lens=_tensor(seq_lens, device),
        block_table=block_table.to(device, non_blocking=True),
        block_table_cpu=block_table,
        slot_mapping=_tensor(slots, device),
        query_start_loc_cpu=tuple(query_start.tolist()),
        seq_lens_cpu=tuple(seq_lens.tolist()),
        max_query_len=int(lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        num_tokens=num_tokens,
    )
    layout = TokenLayout(num_tokens=num_tokens, num_padded=num_tokens, is_padding=None, num_padded_max=num_padded_max)
    return UBatchInputs(
        token_ids=_tensor(_token_ids(batch, num_tokens), device),
        positions=_tensor(positions, device),
        attention=attention,
        layout=layout,
    )


def _token_ids(batch: Batch, num_tokens: int) -> np.ndarray:
    ids: list[int] = []
    for scheduled in batch.requests:
        ids += scheduled.request.token_ids[scheduled.start : scheduled.start + scheduled.num_tokens]
    if len(ids) != num_tokens:
        raise AssertionError(f"{num_tokens} tokens scheduled, {len(ids)} known")
    return np.array(ids, dtype=np.int64)


def _block_table(batch: Batch, seq_lens: np.ndarray, block_size: int) -> np.ndarray:
    """int32 [R, B]: the blocks each request's tokens up to this step lie in; unused entries are 0."""
    counts = [-(-int(n) // block_size) for n in seq_lens]
    table = np.zeros((len(counts), max(counts, default=1)), dtype=np.int32)
    for i, scheduled in enumerate(batch.requests):
        table[i, : counts[i]] = scheduled.block_ids[: counts[i]]
    return table


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
