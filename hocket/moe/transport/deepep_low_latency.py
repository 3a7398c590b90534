"""DeepEP's low-latency kernels between the GPUs of one host: a row for each expert of a token, straight to its place
there, in two halves that take no multiprocessors in between.

Shapes: T this rank's rows, M most rows of a rank in one dispatch, E local experts, R = ranks · M places of one expert,
D hidden, K top-k.

M is one number for all steps and ranks: messages of another M would lie across those of the one before, which other
ranks may still read. The library keeps two areas, used in turn, and a send clears what the next one counts with. So
each receive must come before the next send, whoever's it is: schedules keep that for any number of ubatches, and it is
checked. What was received lies outside these areas, in the memory of the lane's stream: it is kept with the handle
until the combine is sent, which waits for the compute that read it.

A rank that is gone leaves the others' kernels waiting, for 100 s at most: by then the engine has ended the processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.dist.collectives import Group
from hocket.errors import CapacityError, OverlapError
from hocket.moe.base import TokenLayout, check_ids
from hocket.moe.grouped import GroupedRows
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport import deepep_library as library
from hocket.moe.transport.base import DispatchedByExpert, Handle, SentBytes, StepSizes, Tokens, Transport
from hocket.moe.transport.deepep_rows import Outgoing, ranks_of, slots_for_others
from hocket.quant import fp8
from hocket.ubatch.transfer import Transfer

ROWS_MULTIPLE = 128
"""Of M: places of an expert are whole tiles of any product over them."""
HEADER_BYTES = 16
"""Before a dispatched row: where it is from."""
FP8_WIDTH_MULTIPLE = 512


class _Opened:
    """The library's buffer, and whose receive comes next."""

    def __init__(self, module: Any, group: Any, numbering: library.Numbering, sizes: StepSizes) -> None:
        self.id_dtype: torch.dtype = module.topk_idx_t
        self.max_tokens = -(-sizes.max_tokens // ROWS_MULTIPLE) * ROWS_MULTIPLE
        num_ranks = numbering.placement.num_ranks
        hint = module.Buffer.get_low_latency_rdma_size_hint
        self.num_bytes = int(hint(self.max_tokens, sizes.hidden_size, num_ranks, numbering.num_experts))
        what = f"deepep_low_latency's buffer for steps of {sizes.max_tokens} tokens"
        library.check_room(what, self.num_bytes, "lower --max-num-batched-tokens or take deepep_high_throughput")
        library.set_up_nvshmem(self.max_tokens)
        self.buffer = module.Buffer(
            group,
            num_rdma_bytes=self.num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=numbering.per_rank,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )
        self.is_fp8, self.takes_fp8 = False, _takes_fp8(sizes.hidden_size)
        self._due = ""

    def sends(self, what: str) -> None:
        """Raise OverlapError where what was sent before has not been received: this would clear its counts."""
        if self._due:
            raise OverlapError(f"a {what} would be sent before the {self._due} in front of it is received")
        self._due = what

    def receives(self, hook: Callable[[], object]) -> None:
        hook()
        self._due = ""


@dataclass(frozen=True, slots=True)
class LowLatencyHandle(Handle):
    """sent: whose ids and weights the combine needs; received: what the library allocated, kept while compute reads
    it; layout: what its combine takes."""

    sent: Outgoing
    received: tuple[Any, Tensor]
    layout: tuple[Any, ...]


class DeepEPLowLatency(Transport):
    """Experts' results travel back unweighted; weighted sums are taken in fp32 where the token is, and rounded once."""

    name = "deepep_low_latency"
    requires_padding = False
    captures = True
    is_apart = True
    closes_together = True
    max_sms = 0

    def __init__(self, placement: ExpertPlacement, rank: int, group: Group | None, device: torch.device) -> None:
        self._placement = placement
        self._numbering = library.Numbering(placement)
        self._rank, self._group = rank, group
        self._num_local = len(placement.experts_of(rank))
        self._numbers = self._numbering.to_numbers(device)
        self._opened: _Opened | None = None

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return library.unavailable_reason(cls.name, device_type)

    def open(self, sizes: StepSizes) -> None:
        library.check_low_latency(sizes, self._numbering)
        self._opened = _Opened(library.load(self.name), self._group, self._numbering, sizes)

    def send_fp8(self) -> None:
        """The library quantises as `quant/fp8.py` does; where it cannot, rows travel as they are."""
        opened = self._library
        opened.is_fp8 = opened.takes_fp8

    def close(self) -> None:
        if self._opened is not None:
            self._opened.buffer.destroy()
            self._opened = None

    def prepare(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout
    ) -> Transfer[DispatchedByExpert]:
        check_ids(topk_ids, self._placement.num_experts, "expert ids")
        opened = self._library
        if len(x) > opened.max_tokens:
            raise CapacityError(f"{len(x)} rows do not fit into the {opened.max_tokens} that there is room for")
        sent = Outgoing.of(x, topk_ids, topk_weights, self._numbers, opened.id_dtype)
        came: list[Any] = []

        def send() -> None:
            opened.sends("dispatch")
            rows, counts, handle, _, hook = opened.buffer.low_latency_dispatch(
                sent.x,
                sent.ids,
                opened.max_tokens,
                self._numbering.num_experts,
                use_fp8=opened.is_fp8,
                return_recv_hook=True,
            )
            came[:] = rows, counts, handle, hook

        def result() -> DispatchedByExpert:
            rows, counts, handle, _ = came
            grouped = self._grouped(rows, counts, layout, topk_ids.shape[1])
            return DispatchedByExpert(grouped, x.dtype, LowLatencyHandle(sent, (rows, counts), handle))

        num_sent = slots_for_others(sent.num_rows, self._placement, topk_ids.shape[1], self._rank)
        return Transfer(
            send=send,
            result=result,
            num_bytes=lambda: num_sent * (_row_bytes(x.shape[1], x.dtype, opened.is_fp8) + HEADER_BYTES),
            receive=lambda: opened.receives(came[-1]),
        )

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        assert isinstance(handle, LowLatencyHandle)
        opened, sent = self._library, handle.sent
        results = self._for_all_numbers(expert_out)
        out = results.new_empty(sent.x.shape)
        hooks: list[Any] = []

        def send() -> None:
            opened.sends("combine")
            _, _, hook = opened.buffer.low_latency_combine(
                results, sent.ids, sent.weights, handle.layout, return_recv_hook=True, out=out
            )
            hooks[:] = [hook]

        num_sent = slots_for_others(sent.num_rows, self._placement, sent.ids.shape[1], self._rank)
        return Transfer(
            send=send,
            result=lambda: out[: sent.num_rows],
            num_bytes=lambda: num_sent * out.shape[1] * out.itemsize,  # as many come as go, on average
            receive=lambda: opened.receives(hooks[0]),
        )

    @classmethod
    def sent_bytes(cls, tokens: Tokens) -> SentBytes | None:
        placement, is_fp8 = tokens.placement, tokens.may_be_fp8 and _takes_fp8(tokens.hidden_size)
        num_sent = sum(rank > 0 for ranks in ranks_of(tokens) for rank in ranks)
        num_places = library.Numbering(placement).per_rank * placement.num_ranks * len(tokens.ids)
        row_bytes = _row_bytes(tokens.hidden_size, tokens.dtype, is_fp8)
        return SentBytes(
            dispatch=num_sent * (row_bytes + HEADER_BYTES),
            combine=num_sent * _row_bytes(tokens.hidden_size, tokens.dtype),
            received=num_places * row_bytes,
            reserved=_reserved_bytes(tokens.hidden_size, num_places),
            is_fp8=is_fp8,
        )

    @property
    def _library(self) -> _Opened:
        assert self._opened is not None, "open comes before the first transfer"
        return self._opened

    def _grouped(self, rows: Any, counts: Tensor, layout: TokenLayout, top_k: int) -> GroupedRows:
        """What came, without places for numbers that stand for no expert. rows: [numbers, R, D], or a pair with scales;
        there are most where every rank's tokens all come here."""
        values, scales = rows if isinstance(rows, tuple) else (rows, None)
        num_tokens = self._placement.num_ranks * layout.num_padded_max
        return GroupedRows(
            x=values[: self._num_local],
            scales=None if scales is None else scales[: self._num_local],
            counts=counts[: self._num_local],
            max_rows=num_tokens * min(top_k, self._num_local),
            expected_rows=num_tokens * top_k / self._placement.num_experts,
        )

    def _for_all_numbers(self, expert_out: Tensor) -> Tensor:
        """[E, R, D] with places also for numbers that stand for no expert."""
        missing = self._numbering.per_rank - len(expert_out)
        if missing == 0:
            return expert_out.contiguous()
        return torch.cat((expert_out, expert_out.new_empty(missing, *expert_out.shape[1:])))


def _reserved_bytes(hidden_size: int, num_places: int) -> int:
    """What the library asks for: two areas to send from and two to receive in, of as many rows in bf16 as there are
    places on all ranks, each with two numbers per 128 columns."""
    return 4 * num_places * (hidden_size * 2 + hidden_size // 128 * 4)


def _takes_fp8(hidden_size: int) -> bool:
    """Whether its kernels quantise rows of this width."""
    return hidden_size % FP8_WIDTH_MULTIPLE == 0


def _row_bytes(hidden_size: int, dtype: torch.dtype, is_fp8: bool = False) -> int:
    """With its scales, fp32, if it is in fp8."""
    return hidden_size + fp8.blocks(hidden_size) * 4 if is_fp8 else hidden_size * dtype.itemsize
