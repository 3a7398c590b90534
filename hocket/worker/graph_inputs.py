"""What a captured decode reads: buffers that stay where they are, filled before each replay. Knows no graphs.

Rows are cut into ubatches at fixed numbers (one ubatch: not at all). Each has a plan of the attention of its own. Its
rows begin at a column that is a multiple of COLUMNS: kernels are compiled for aligned memory.

Padding rows are requests of one token in a block of their own that nobody else reads; no expert computes them.

Legend: S captured rows, C columns (S and what is left free between ubatches), B blocks of the longest request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.attention.decode_buffers import Fence
from hocket.attention.plan import Plan
from hocket.cache.storage import block_size_of, num_blocks_of, slot_bytes_of
from hocket.models.base import CausalLM, UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.worker.inputs import KNOWN, HostInputs, fill_in

COLUMNS = 16
IDS, POSITIONS, SOURCES, PADDING = range(4)


@dataclass(frozen=True)
class _Part:
    """Rows [start, stop) of the step, at columns from `column` on; attended by `plan`. starts: 0, 1 … of its rows."""

    start: int
    stop: int
    column: int
    plan: Plan
    starts: Tensor
    starts_cpu: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        return slice(self.column, self.column + self.num_rows)


class GraphInputs:
    """Of S = bounds[-1] rows, in ubatches that end at `bounds`.

    last_ids: int64, what sources point into (`HostInputs.sources`).
    """

    def __init__(
        self, model: CausalLM, cache: Tensor, max_model_len: int, bounds: tuple[int, ...], last_ids: Tensor
    ) -> None:
        self.bounds = bounds
        self.scrap_block = num_blocks_of(cache) - 1
        self.block_size = block_size_of(cache)
        self._last_ids = last_ids
        self._max_model_len = max_model_len
        self._attention = model.backends.attention
        self._parts: list[_Part] = []
        num_columns = 0
        for start, stop in pairwise((0, *bounds)):
            num_rows = stop - start
            plan = self._attention.decode_plan(
                num_rows, max_model_len, self.block_size, model.dtype, slot_bytes_of(cache)
            )
            starts = torch.arange(num_rows + 1, dtype=torch.int32)
            self._parts.append(_Part(start, stop, num_columns, plan, starts, tuple(starts.tolist())))
            num_columns += -(-num_rows // COLUMNS) * COLUMNS
        self._columns = np.concatenate([np.r_[part.columns] for part in self._parts])
        device = last_ids.device
        self._host = torch.zeros(4, num_columns, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(4, num_columns, dtype=torch.int64, device=device)
        self._copied = Fence(device)
        self._nothing = self._metadata(HostInputs.nothing())

    @property
    def size(self) -> int:
        return self.bounds[-1]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of the attention of each ubatch."""
        return tuple(part.plan for part in self._parts)

    def ubatches(self) -> tuple[UBatchInputs, ...]:
        """What the model reads of each ubatch. Launches kernels on the buffers, so it belongs to what is captured."""
        token_ids, positions, sources, padding = self._on_device
        token_ids = fill_in(token_ids, sources, self._last_ids)
        is_padding = padding.to(torch.bool)
        return tuple(
            UBatchInputs(
                token_ids=token_ids[part.columns],
                positions=positions[part.columns],
                attention=attention,
                layout=TokenLayout(
                    num_tokens=0,
                    num_padded=part.num_rows,
                    is_padding=is_padding[part.columns],
                    num_padded_max=part.num_rows,
                ),
            )
            for part, attention in zip(self._parts, self._nothing, strict=True)
        )

    def fill(self, host: HostInputs) -> None:
        """Make it the step of `host`, at most S requests of one token each. The host's buffers are free again once
        copied."""
        self._copied.wait()
        rows, at = self._host.numpy(), self._columns[: host.num_tokens]
        rows[:] = [[0], [0], [KNOWN], [1]]
        rows[IDS, at], rows[POSITIONS, at], rows[PADDING, at] = host.token_ids, host.positions, 0
        rows[SOURCES, at] = KNOWN if host.sources is None else host.sources
        self._on_device.copy_(self._host, non_blocking=True)
        for part, attention in zip(self._parts, self._metadata(host), strict=True):
            self._attention.update(part.plan, attention)
        self._copied.set()

    def _metadata(self, host: HostInputs) -> tuple[AttentionMetadata, ...]:
        """Of each ubatch, on the host: requests of one token; those past the real ones lie in the scrap block."""
        size, count = self.size, host.num_tokens
        table = np.full((size, max(host.block_table.shape[1], 1)), self.scrap_block, dtype=np.int32)
        table[:count, : host.block_table.shape[1]] = host.block_table
        seq_lens = np.ones(size, dtype=np.int32)
        seq_lens[:count] = host.seq_lens
        slots = np.full(size, self.scrap_block * self.block_size, dtype=np.int64)
        slots[:count] = host.slots
        return tuple(self._part_of(part, table, seq_lens, slots) for part in self._parts)

    def _part_of(self, part: _Part, table: np.ndarray, seq_lens: np.ndarray, slots: np.ndarray) -> AttentionMetadata:
        """The requests of one ubatch of `table` [S, B], `seq_lens` and `slots` [S]."""
        rows = slice(part.start, part.stop)
        blocks = torch.from_numpy(table[rows])
        return AttentionMetadata(
            query_start_loc=part.starts,
            seq_lens=torch.from_numpy(seq_lens[rows]),
            block_table=blocks,
            block_table_cpu=blocks,
            slot_mapping=torch.from_numpy(slots[rows]),
            query_start_loc_cpu=part.starts_cpu,
            seq_lens_cpu=tuple(seq_lens[rows].tolist()),
            max_query_len=1,
            max_seq_len=self._max_model_len,
            num_tokens=part.num_rows,
        )
