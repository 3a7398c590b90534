"""What every experts backend is: the weights of a rank's experts and one forward. Knows nothing of ranks or routing.

Shapes: T rows, D hidden, I intermediate, E local experts, K top-k.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import ConfigError
from hocket.moe.base import check_ids
from hocket.moe.grouped import GroupedRows


class Experts(nn.Module, ABC):
    """E gated MLPs, w2 · (silu(gate) * up). `w13` [E, 2I, D] holds the gate's rows before up's; `w2` is [E, D, I].

    E may be 0: a rank without experts still takes part. num_experts: of all ranks, E where it is None. dtype: of rows.
    local_id_of: int64 [num_experts + 1], the index here of each expert, -1 for those of other ranks and at the end;
    None where ids are indices.
    """

    name: ClassVar[str]
    captures: ClassVar[bool] = False
    """Whether a CUDA graph can hold it: the host never waits for the device."""
    takes_fp8_rows: ClassVar[bool] = False
    """Whether `forward_grouped` takes rows that were quantised where they come from."""
    num_sms: int | None = None
    """How many multiprocessors the products may take, None for all, where the backend is told at each call. DeepGEMM
    is told for the whole process (`fp8.limit_sms`)."""

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str = "silu",
        num_experts: int | None = None,
        local_id_of: Tensor | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_act != "silu":
            raise ConfigError("hidden_act", hidden_act, "silu")
        self.num_local_experts = num_local_experts
        self.dtype = dtype or torch.get_default_dtype()
        self.num_experts = num_local_experts if num_experts is None else num_experts
        self.local_id_of = local_id_of
        w13 = torch.empty(num_local_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype)
        w2 = torch.empty(num_local_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
        self.w13 = nn.Parameter(w13, requires_grad=False)
        self.w2 = nn.Parameter(w2, requires_grad=False)

    @classmethod
    def unsupported_reason(cls, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> str | None:
        """Why this backend cannot run these widths in this dtype, or None where it can."""
        return None

    def check_ids(self, ids: Tensor) -> None:
        """Raise HocketError unless all are -1 or ids of experts (on a CPU only)."""
        check_ids(ids, self.num_local_experts if self.local_id_of is None else self.num_experts, "expert ids")

    def local_ids(self, ids: Tensor) -> Tensor:
        """int64 [T, K]: the index here of each expert, -1 where it is on another rank or there is none."""
        self.check_ids(ids)
        return ids.long() if self.local_id_of is None else self.local_id_of[ids.clamp(-1, self.num_experts)]

    def rows_per_expert(self, ids: Tensor) -> float:
        """How many rows of ids [T, K] each local expert gets on average, were all experts as popular: the shape
        alone says it, and backends choose block sizes by it."""
        return ids.numel() / max(1, self.num_experts)

    @abstractmethod
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each row's local experts, accumulated in fp32.

        x [T, D]; ids int [T, K] (-1 and experts of other ranks are skipped); weights fp32 [T, K]. Returns [T, D] in
        x.dtype, a row without experts is zero whatever x holds there (NaN too). T may be 0.

        Raises:
            HocketError: an id is out of range (checked on a CPU only).
        """

    def forward_grouped(self, rows: GroupedRows) -> Tensor:
        """Each row's result from the expert that it stands at, not weighted: [E, R, D] in `dtype`, undefined where
        there is no row.

        Backends whose products take rows expert by expert do without the copies that are made here.
        """
        shape = rows.x.shape
        if self.num_local_experts == 0 or rows.max_rows == 0:
            return rows.x.new_empty(shape, dtype=self.dtype)
        assert rows.scales is None, "these experts take rows as they are"
        flat = rows.x.view(-1, shape[-1])
        expert, place = rows.taken()
        ones = torch.ones(len(expert), 1, device=flat.device)
        out = self._of_indices(rows.expected_rows)(flat[place.clamp(max=len(flat) - 1)], expert[:, None], ones)
        result = flat.new_empty(len(flat) + 1, shape[-1])  # the last one takes what is no row
        return result.index_copy_(0, place, out)[:-1].view(shape)

    def _of_indices(self, expected_rows: float) -> Experts:
        """The same experts, which take indices of theirs for ids and are told how many rows of one to expect."""
        found = copy.copy(self)
        found.local_id_of = None
        found.rows_per_expert = lambda ids: expected_rows  # type: ignore[method-assign]
        return found


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] → [T, I]: silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
