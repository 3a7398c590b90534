"""The transport of fixed shapes: every rank gets every token, and results are reduced to the tokens' ranks.

Shapes: T this rank's rows, P rows every rank pads to, D hidden, K top-k, n ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.dist import collectives
from hocket.errors import CapacityError
from hocket.moe.base import TokenLayout, check_ids, is_on_host
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Dispatched, Handle, Transport, check_numbers, most_received
from hocket.moe.transport.rows import INT32_MAX, RowFormat
from hocket.ubatch.transfer import Transfer


@dataclass(frozen=True, slots=True)
class GatherHandle(Handle):
    """T and P of the call."""

    num_rows: int
    num_padded_max: int


class AllGatherReduceScatterTransport(Transport):
    """One all-gather of rows padded to P, one reduce-scatter of results. Padding rows have ids of -1.

    Every row goes to every rank, wanted there or not; in return no count is read on the host, so it can be captured.
    """

    name = "allgather_reducescatter"
    requires_padding = True
    captures = True

    def __init__(
        self, placement: ExpertPlacement, rank: int, group: collectives.Group | None, device: torch.device
    ) -> None:
        self._num_experts = placement.num_experts
        self._num_ranks = placement.num_ranks
        self._group = group
        self._numbers = itertools.count()

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        check_ids(topk_ids, self._num_experts, "expert ids")
        num_rows, padded = x.shape[0], layout.num_padded_max
        if num_rows > padded:
            raise CapacityError(f"{num_rows} rows do not fit into the {padded} that every rank pads to")
        rows = RowFormat(x.shape[1], topk_ids.shape[1], x.dtype)
        number = next(self._numbers) & INT32_MAX
        sent = rows.pack(x, topk_ids, topk_weights, padded, number)
        received = sent.new_empty(most_received(self._num_ranks, padded), rows.row_bytes)

        def result() -> Dispatched:
            if padded and is_on_host(received):
                check_numbers(number, torch.split(rows.numbers(received), padded))
            return Dispatched(*rows.unpack(received), handle=GatherHandle(num_rows, padded))

        return Transfer(
            send=lambda: collectives.all_gather(received, sent, self._group),
            result=result,
            num_bytes=lambda: sent.numel() * (self._num_ranks - 1),
        )

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        assert isinstance(handle, GatherHandle)
        number = next(self._numbers) & INT32_MAX
        if is_on_host(expert_out):
            return self._exchange_and_add(expert_out, handle, number)
        out = expert_out.new_empty(handle.num_padded_max, expert_out.shape[1])
        sums = expert_out.contiguous()
        return Transfer(
            send=lambda: collectives.reduce_scatter_sum(out, sums, self._group),
            result=lambda: out if handle.num_rows == len(out) else out[: handle.num_rows],
            num_bytes=lambda: out.nbytes * (self._num_ranks - 1),
        )

    def _exchange_and_add(self, expert_out: Tensor, handle: GatherHandle, number: int) -> Transfer[Tensor]:
        """The same by an exchange of numbered rows, which are added in fp32 in rank order."""
        padded = handle.num_padded_max
        rows = RowFormat(expert_out.shape[1], 0, expert_out.dtype)
        sent = rows.pack_sums(expert_out, number)
        received = torch.empty_like(sent)

        def result() -> Tensor:
            if padded:
                check_numbers(number, torch.split(rows.numbers(received), padded))
            parts = rows.unpack(received)[0].view(self._num_ranks, padded, expert_out.shape[1])
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            return total[: handle.num_rows].to(expert_out.dtype)

        return Transfer(
            send=lambda: collectives.all_to_all(received, sent, self._group),
            result=result,
            num_bytes=lambda: padded * rows.row_bytes * (self._num_ranks - 1),
        )
