"""Turns a scheduled batch into the tensors the model reads. Knows nothing of models, sampling or other ranks' data.

Legend: T tokens of this step, R requests, B blocks of the longest request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.host import sent
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.request import Request
from hocket.scheduler.batch import Batch

KNOWN = -1
"""The source of a token whose id is known on the host."""
Sources = Mapping[Request, int]
"""Requests whose next token is still being sampled on the device: its index among the ids sampled there last."""


@dataclass(frozen=True, slots=True)
class HostInputs:
    """A batch as arrays. token_ids, positions, slots, sources: int64 [T]; block_table int32 [R, B]; seq_lens int32 [R];
    query_start int32 [R + 1]. A token of source ≥ 0 has id 0 here and gets its own on the device.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    sources: np.ndarray | None
    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start: np.ndarray
    max_query_len: int

    @classmethod
    def of(cls, batch: Batch, block_size: int, sources: Sources | None = None) -> HostInputs:
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
        slots = blocks[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        token_ids, token_sources = _token_ids(batch, num_tokens, sources or {})
        return cls(token_ids, positions, slots, token_sources, blocks, seq_lens, query_start, int(lens.max(initial=0)))

    @classmethod
    def nothing(cls) -> HostInputs:
        """Of a rank without requests."""
        return cls.of(Batch(), 1)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def metadata(self, device: torch.device) -> AttentionMetadata:
        block_table = torch.from_numpy(self.block_table)
        return AttentionMetadata(
            query_start_loc=sent(self.query_start, torch.int32, device),
            seq_lens=sent(self.seq_lens, torch.int32, device),
            block_table=sent(self.block_table, torch.int32, device),
            block_table_cpu=block_table,
            slot_mapping=sent(self.slots, torch.int64, device),
            query_start_loc_cpu=tuple(self.query_start.tolist()),
            seq_lens_cpu=tuple(self.seq_lens.tolist()),
            max_query_len=self.max_query_len,
            max_seq_len=int(self.seq_lens.max(initial=0)),
            num_tokens=self.num_tokens,
        )


def build_inputs(
    batch: Batch,
    num_padded_max: int,
    block_size: int,
    device: torch.device,
    sources: Sources | None = None,
    last_ids: Tensor | None = None,
) -> UBatchInputs:
    """The whole batch as one UBatchInputs: token ids and positions int64 [T], attention metadata, token layout.

    num_padded_max: tokens of the rank that has most. last_ids: int64, what `sources` point into, on `device`.
    """
    host = HostInputs.of(batch, block_size, sources)
    token_ids = sent(host.token_ids, torch.int64, device)
    if host.sources is not None:
        assert last_ids is not None
        token_ids = fill_in(token_ids, sent(host.sources, torch.int64, device), last_ids)
    num_tokens = host.num_tokens
    layout = TokenLayout(num_tokens=num_tokens, num_padded=num_tokens, is_padding=None, num_padded_max=num_padded_max)
    return UBatchInputs(
        token_ids=token_ids,
        positions=sent(host.positions, torch.int64, device),
        attention=host.metadata(device),
        layout=layout,
    )


def fill_in(token_ids: Tensor, sources: Tensor, last_ids: Tensor) -> Tensor:
    """token_ids int64 [T] with those of source ≥ 0 taken from last_ids: int64 [T]."""
    return torch.where(sources < 0, token_ids, last_ids[sources.clamp(min=0)])


def _token_ids(batch: Batch, num_tokens: int, sources: Sources) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids int64 [T], and where those come from that are not known yet: int64 [T], None where all are known."""
    ids: list[int] = []
    unknown: list[tuple[int, int]] = []
    for scheduled in batch.requests:
        request, end = scheduled.request, scheduled.start + scheduled.num_tokens
        ids += request.token_ids[scheduled.start : end]
        if end > len(request.token_ids):
            unknown.append((len(ids), sources[request]))
            ids.append(0)
    if len(ids) != num_tokens:
        raise AssertionError(f"{num_tokens} tokens scheduled, {len(ids)} known")
    if not unknown:
        return np.array(ids, dtype=np.int64), None
    found = np.full(num_tokens, KNOWN, dtype=np.int64)
    at, source = np.array(unknown, dtype=np.int64).T
    found[at] = source
    return np.array(ids, dtype=np.int64), found


def _block_table(batch: Batch, seq_lens: np.ndarray, block_size: int) -> np.ndarray:
    """int32 [R, B]: the blocks each request's tokens up to this step lie in; unused entries are 0."""
    counts = [-(-int(n) // block_size) for n in seq_lens]
    table = np.zeros((len(counts), max(counts, default=1)), dtype=np.int32)
    for i, scheduled in enumerate(batch.requests):
        table[i, : counts[i]] = scheduled.block_ids[: counts[i]]
    return table
