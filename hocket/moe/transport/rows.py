"""One token as one row of bytes, so that hidden state, expert ids and weights travel in one message. Knows no ranks.

Shapes: N rows, D hidden, K top-k. A row is [x: D | ids: K int32, number: int32 | weights: K fp32], each part padded to
16 bytes. The number says which transfer a row is of: ranks that are not at the same must not take each other's rows.
Results that travel back are rows of K = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from hocket.moe.base import DROPPED

ALIGN_BYTES = 16
SLOT_BYTES = 4
INT32_MAX = 0x7FFFFFFF


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@cache
def _layout(hidden_size: int, top_k: int, dtype: torch.dtype) -> tuple[int, int, int, int, int, int]:
    """In bytes of a row: where x ends, where ids and number begin and end, the same of the weights, and all."""
    x_end = hidden_size * dtype.itemsize
    ids_at = _align(x_end)
    ids_end = ids_at + (top_k + 1) * SLOT_BYTES
    weights_at = _align(ids_end)
    weights_end = weights_at + top_k * SLOT_BYTES
    return x_end, ids_at, ids_end, weights_at, weights_end, _align(weights_end)


@cache
def _parts(hidden_size: int, top_k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of x, padding, ids, number, padding, weights, padding."""
    x_end, ids_at, ids_end, weights_at, weights_end, row_bytes = _layout(hidden_size, top_k, dtype)
    ends = (0, x_end, ids_at, ids_end - SLOT_BYTES, ids_end, weights_at, weights_end, row_bytes)
    return tuple(end - start for start, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of rows for one hidden size, dtype and top-k."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return _layout(self.hidden_size, self.top_k, self.dtype)[-1]

    def pack(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_rows: int, number: int = 0, into: Tensor | None = None
    ) -> Tensor:
        """x [N, D], ids [N, K], weights [N, K] → uint8 [num_rows, row_bytes], `into` if it is given, all of which is
        set; rows past N are zeros with ids of -1."""
        rows = into
        if rows is None:
            rows = torch.empty(num_rows, self.row_bytes, device=x.device, dtype=torch.uint8)
        if x.is_cuda:
            from hocket.moe.transport import pack_kernels

            _, ids_at, _, weights_at, _, _ = _layout(self.hidden_size, self.top_k, self.dtype)
            pack_kernels.pack(rows, ids_at, weights_at, x, ids, weights, number, DROPPED)
            return rows
        rows.zero_()
        row_x, row_ids, row_numbers, row_weights = self._views(rows)
        count = x.shape[0]
        row_x[:count] = x
        row_ids[:count] = ids
        row_ids[count:] = DROPPED
        row_numbers[:] = number
        row_weights[:count] = weights
        return rows

    def pack_sums(self, sums: Tensor, number: int) -> Tensor:
        """sums [N, D] → uint8 [N, row_bytes], where K = 0."""
        num_rows, device = sums.shape[0], sums.device
        nothing = torch.empty(num_rows, 0, dtype=torch.int32, device=device)
        return self.pack(sums, nothing, nothing.float(), num_rows, number)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 [N, row_bytes] → (x [N, D], ids int32 [N, K], weights fp32 [N, K]), all of them views."""
        x, ids, _, weights = self._views(rows)
        return x, ids, weights

    def numbers(self, rows: Tensor) -> Tensor:
        """uint8 [N, row_bytes] → int32 [N]: the number each row was packed with."""
        return self._views(rows)[2][:, 0]

    def _views(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ids, numbers [N, 1] and weights."""
        x, _, ids, number, _, weights, _ = rows.split_with_sizes(_parts(self.hidden_size, self.top_k, self.dtype), 1)
        return x.view(self.dtype), ids.view(torch.int32), number.view(torch.int32), weights.view(torch.float32)
