"""DeepEP's high-throughput kernels between the GPUs of one host: a token once to each rank that holds one of its
experts, through buffers that a few multiprocessors fill and empty.

Shapes: T this rank's rows, P rows every rank pads to, N = ranks · P rows received at most, D hidden, K top-k.

The kernels run on a stream of the library's own, which waits for the stream of the caller and is waited for by it: its
asynchronous mode stays off. With N given, no count is read on the host; rows that did not come have no experts. What
the library allocates lies in the memory of the lane's stream. It is kept with the handle until the combine is sent,
which waits for the compute that read it; results are copied to memory of the compute stream for the same reason.

A rank that is gone leaves the others' kernels waiting, for 100 s at most: by then the engine has ended the processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.dist.collectives import Group
from hocket.moe.base import TokenLayout, check_ids
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport import deepep_library as library
from hocket.moe.transport.base import Dispatched, Handle, SentBytes, StepSizes, Tokens, Transport, most_received
from hocket.moe.transport.deepep_rows import Outgoing, ranks_of, rows_for_others
from hocket.ubatch.transfer import Transfer

ID_BYTES, WEIGHT_BYTES, SOURCE_BYTES = 8, 4, 4


class _Opened:
    """The library's buffer, and how many multiprocessors its kernels take. The buffer is large enough for max_sms."""

    def __init__(self, module: Any, group: Any, num_ranks: int, sizes: StepSizes, max_sms: int) -> None:
        self._module, self._num_ranks = module, num_ranks
        self.id_dtype: torch.dtype = module.topk_idx_t
        self.limit(max_sms)
        row_bytes = sizes.hidden_size * sizes.dtype.itemsize
        hints = [config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in (self.dispatch, self.combine)]
        what = f"deepep_high_throughput's buffer for {num_ranks} ranks"
        library.check_room(what, max(hints), "take --all2all-backend allgather_reducescatter, which keeps none")
        self.buffer = module.Buffer(group, num_nvl_bytes=max(hints), explicitly_destroy=True)

    def limit(self, num_sms: int) -> int:
        """From now on; an even number, what is over is left out. Returns what it was."""
        buffer = self._module.Buffer
        found, before = buffer.num_sms, getattr(self, "num_sms", 0)
        self.num_sms = max(2, num_sms // 2 * 2)
        buffer.set_num_sms(self.num_sms)
        try:
            self.dispatch = buffer.get_dispatch_config(self._num_ranks)
            self.combine = buffer.get_combine_config(self._num_ranks)
        finally:
            buffer.set_num_sms(found)
        return before


@dataclass(frozen=True, slots=True)
class DispatchHandle(Handle):
    """received: what the library allocated, kept while compute reads it; layout: what its combine takes, and with which
    configuration: of as many multiprocessors as the dispatch."""

    received: tuple[Tensor, Tensor, Tensor]
    layout: tuple[Tensor, ...]
    combine: Any
    num_rows: int
    top_k: int


class DeepEPHighThroughput(Transport):
    """Results are summed in fp32 and rounded once, like partial sums of the others.

    Nothing on the host keeps it out of a CUDA graph: the library waits for counts there only where it is not given N
    (`num_worst_tokens`, inside one host), and says that a graph can hold a dispatch that is. No GPU has shown that yet,
    so engines capture none.
    """

    name = "deepep_high_throughput"
    requires_padding = True
    closes_together = True
    max_sms = 24
    """As many as help: 167 GB/s on two H200s, against 128 with 20."""

    def __init__(self, placement: ExpertPlacement, rank: int, group: Group | None, device: torch.device) -> None:
        self._numbering = library.Numbering(placement)
        self._rank, self._group = rank, group
        self._numbers = self._numbering.to_numbers(device)
        self._ids = torch.tensor(self._numbering.ids_of(rank), device=device)
        self._opened: _Opened | None = None

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return library.unavailable_reason(cls.name, device_type)

    def open(self, sizes: StepSizes) -> None:
        library.check_high_throughput(sizes, self._numbering)
        module = library.load(self.name)
        self._opened = _Opened(module, self._group, self._num_ranks, sizes, self.max_sms)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.buffer.destroy()
            self._opened = None

    def limit_sms(self, num_sms: int) -> Callable[[], object]:
        opened = self._library
        before = opened.limit(min(num_sms, self.max_sms))
        return lambda: opened.limit(before)

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        check_ids(topk_ids, self._numbering.placement.num_experts, "expert ids")
        opened, top_k = self._library, topk_ids.shape[1]
        sent = Outgoing.of(x, topk_ids, topk_weights, self._numbers, opened.id_dtype)
        most = max(1, most_received(self._num_ranks, layout.num_padded_max))
        dispatch, combine = opened.dispatch, opened.combine
        came: list[DispatchHandle] = []

        def send() -> None:
            to_rank, _, to_expert, is_for_rank, _ = opened.buffer.get_dispatch_layout(
                sent.ids, self._numbering.num_experts
            )
            rows, ids, weights, _, handle, _ = opened.buffer.dispatch(
                sent.x,
                num_tokens_per_rank=to_rank,
                is_token_in_rank=is_for_rank,
                num_tokens_per_expert=to_expert,
                topk_idx=sent.ids,
                topk_weights=sent.weights,
                num_worst_tokens=most,
                config=dispatch,
            )
            came[:] = [DispatchHandle((rows, ids, weights), handle, combine, sent.num_rows, top_k)]

        def result() -> Dispatched:
            rows, indices, weights = came[0].received
            return Dispatched(rows, self._ids[indices.long()], weights, came[0])

        row_bytes = _dispatched_bytes(x.shape[1], x.dtype, top_k)
        return Transfer(send, result, lambda: self._num_sent(sent.num_rows, top_k) * row_bytes)

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        assert isinstance(handle, DispatchHandle)
        opened, sums = self._library, expert_out.contiguous()
        out = sums.new_empty(handle.num_rows, sums.shape[1])

        def send() -> None:
            combined, _, _ = opened.buffer.combine(sums, handle.layout, config=handle.combine)
            out.copy_(combined[: handle.num_rows])

        num_sent = self._num_sent(handle.num_rows, handle.top_k)  # as many come as go, on average
        return Transfer(send, lambda: out, lambda: num_sent * out.shape[1] * out.itemsize)

    @classmethod
    def sent_bytes(cls, tokens: Tokens) -> SentBytes | None:
        top_k = tokens.ids.shape[1]
        num_sent = sum(len(set(ranks) - {0}) for ranks in ranks_of(tokens))
        row_bytes = _dispatched_bytes(tokens.hidden_size, tokens.dtype, top_k)
        num_received = most_received(tokens.placement.num_ranks, len(tokens.ids))
        return SentBytes(
            dispatch=num_sent * row_bytes,
            combine=num_sent * tokens.hidden_size * tokens.dtype.itemsize,
            received=num_received * row_bytes,
        )

    @property
    def _num_ranks(self) -> int:
        return self._numbering.placement.num_ranks

    @property
    def _library(self) -> _Opened:
        assert self._opened is not None, "open comes before the first transfer"
        return self._opened

    def _num_sent(self, num_rows: int, top_k: int) -> int:
        return rows_for_others(num_rows, self._numbering.placement, top_k, self._rank)


def _dispatched_bytes(hidden_size: int, dtype: torch.dtype, top_k: int) -> int:
    """A row with the numbers and weights of its experts, and where it is from."""
    return hidden_size * dtype.itemsize + top_k * (ID_BYTES + WEIGHT_BYTES) + SOURCE_BYTES
