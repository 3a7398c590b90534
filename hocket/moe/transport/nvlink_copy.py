"""A transport inside one host without thread blocks: each rank's copy engines write its rows into the others' memory.

Shapes: T this rank's rows, P rows every rank pads to, D hidden, K top-k, n ranks.

A call has a slot of the memory: for the rows of all ranks that its dispatch brings, and for the sums of all ranks that
its combine brings. Calls take the slots in turn, as many as there are ubatches. Nobody says when a slot is free, since
the next dispatch into it comes behind this call's combine: whoever sent me sums has read my rows, and whoever sends me
rows again has read my sums. That needs a call's receives before the next call in its slot, which schedules keep, and no
more calls under way than slots, which is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.config.backends import NCCL_TRANSPORTS
from hocket.dist.collectives import Group
from hocket.errors import CapacityError, ConfigError, OverlapError
from hocket.moe.base import TokenLayout, check_ids
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport import peer_memory
from hocket.moe.transport.base import Dispatched, Handle, SentBytes, StepSizes, Tokens, Transport, most_received
from hocket.moe.transport.peer_memory import PeerMemory
from hocket.moe.transport.rank_sums import add_ranks
from hocket.moe.transport.rows import RowFormat
from hocket.ubatch.transfer import Transfer

SLOT_ALIGN = 512
"""Bytes: every part of the memory begins at a multiple."""
DISPATCH, COMBINE = range(2)


@dataclass(frozen=True, slots=True)
class CopyHandle(Handle):
    """Slot, T and P of the call."""

    slot: int
    num_rows: int
    num_padded_max: int


class _Slots:
    """The memory, in slots of two parts; of a part each rank has an equal piece, one behind the other. next: whose turn
    it is."""

    def __init__(self, sizes: StepSizes, num_ranks: int, rank: int, group: Group, device: torch.device) -> None:
        most = most_received(num_ranks, sizes.max_tokens)
        row_bytes = RowFormat(sizes.hidden_size, sizes.top_k, sizes.dtype).row_bytes
        part_bytes = _aligned(most * row_bytes), _aligned(most * sizes.hidden_size * sizes.dtype.itemsize)
        self.count, self.max_tokens = sizes.num_ubatches, sizes.max_tokens
        self._starts = 0, part_bytes[DISPATCH]
        self._slot_bytes = sum(part_bytes)
        self.others = [(rank + step) % num_ranks for step in range(1, num_ranks)]  # not all write to the same one first
        self._num_ranks, self._rank = num_ranks, rank
        self.memory = PeerMemory(self._slot_bytes * self.count, group, device)
        self.next = 0
        self._under_way = 0

    def take(self) -> None:
        """The slot `next` is that of a call, on all ranks."""
        self.next = (self.next + 1) % self.count

    def here(self, slot: int, part: int, num_bytes: int) -> Tensor:
        """uint8 [n · num_bytes], what each rank, in rank order, writes into this one's memory."""
        start = slot * self._slot_bytes + self._starts[part]
        return self.memory.of_rank[self._rank][start : start + self._num_ranks * num_bytes]

    def mine(self, slot: int, part: int, num_bytes: int, at: int) -> Tensor:
        """uint8 [num_bytes], where this rank writes into the memory of rank `at`."""
        start = slot * self._slot_bytes + self._starts[part] + self._rank * num_bytes
        return self.memory.of_rank[at][start : start + num_bytes]

    def begin(self) -> None:
        """A dispatch is sent. Raises OverlapError where its slot may still be read."""
        if self._under_way == self.count:
            raise OverlapError(f"more than {self.count} calls would be under way, which have no slots")
        self._under_way += 1

    def end(self) -> None:
        """A combine was received."""
        self._under_way -= 1

    def signal(self, slot: int, part: int) -> None:
        """Tell all others that what they get is there."""
        for other in self.others:
            self.memory.signal(other, 2 * slot + part)

    def wait(self, slot: int, part: int) -> None:
        """Go on when all others have told so."""
        for other in self.others:
            self.memory.wait(other, 2 * slot + part)


class NVLinkCopyTransport(Transport):
    """Every row goes to every rank, as with `allgather_reducescatter`, and sums of results go to the tokens' ranks, who
    add them up in fp32 in rank order. Copies need no multiprocessor; signals are kernels of one warp, which compute
    must leave room for: those that it does not leave a multiprocessor wait until a product is over."""

    name = "nvlink_copy"
    requires_padding = True
    captures = True
    is_apart = True
    max_sms = 2

    def __init__(self, placement: ExpertPlacement, rank: int, group: Group | None, device: torch.device) -> None:
        self._num_experts, self._num_ranks = placement.num_experts, placement.num_ranks
        self._rank, self._group, self._device = rank, group, device
        self._opened: _Slots | None = None

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return peer_memory.unavailable_reason(device_type)

    def open(self, sizes: StepSizes) -> None:
        if sizes.num_local_ranks != self._num_ranks:
            allowed = "torch or allgather_reducescatter"
            raise ConfigError("all2all_backend", self.name, allowed, where="for ranks on several hosts")
        assert self._group is not None
        peer_memory.check_peers(self.name, self._device, list(NCCL_TRANSPORTS))
        try:
            self._opened = _Slots(sizes, self._num_ranks, self._rank, self._group, self._device)
        except CapacityError as error:
            raise CapacityError(f"{self.name}: {error}: lower --max-num-batched-tokens") from error

    def close(self) -> None:
        self._opened = None

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        check_ids(topk_ids, self._num_experts, "expert ids")
        slots, (num_rows, padded) = self._slots, (x.shape[0], layout.num_padded_max)
        if not num_rows <= padded <= slots.max_tokens:
            raise CapacityError(f"{num_rows} rows, padded to {padded}, do not fit into {slots.max_tokens}")
        slot, rows = slots.next, RowFormat(x.shape[1], topk_ids.shape[1], x.dtype)
        num_bytes = padded * rows.row_bytes
        here = slots.here(slot, DISPATCH, num_bytes)
        mine = slots.mine(slot, DISPATCH, num_bytes, self._rank)
        rows.pack(x, topk_ids, topk_weights, padded, into=mine.view(padded, rows.row_bytes))
        slots.take()  # not where packing failed: this rank will try again, the others do not

        def send() -> None:
            slots.begin()
            if num_bytes:
                for other in slots.others:
                    slots.mine(slot, DISPATCH, num_bytes, other).copy_(mine)
            slots.signal(slot, DISPATCH)

        def result() -> Dispatched:
            received = here.view(-1, rows.row_bytes)
            return Dispatched(*rows.unpack(received), handle=CopyHandle(slot, num_rows, padded))

        return Transfer(
            send=send,
            result=result,
            num_bytes=lambda: num_bytes * (self._num_ranks - 1),
            receive=lambda: slots.wait(slot, DISPATCH),
        )

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        assert isinstance(handle, CopyHandle)
        slots, slot, padded, hidden_size = self._slots, handle.slot, handle.num_padded_max, expert_out.shape[1]
        sums = expert_out.contiguous().view(self._num_ranks, padded, hidden_size)
        num_bytes = padded * hidden_size * sums.itemsize
        here = slots.here(slot, COMBINE, num_bytes)

        def send() -> None:
            if num_bytes:
                for other in slots.others:
                    there = slots.mine(slot, COMBINE, num_bytes, other)
                    there.view(sums.dtype).view(padded, hidden_size).copy_(sums[other])
            slots.signal(slot, COMBINE)

        def receive() -> None:
            slots.wait(slot, COMBINE)
            slots.end()

        def result() -> Tensor:
            came = here.view(sums.dtype).view(sums.shape)
            return add_ranks(sums[self._rank], came, self._rank, handle.num_rows)

        return Transfer(send=send, result=result, num_bytes=lambda: num_bytes * (self._num_ranks - 1), receive=receive)

    @classmethod
    def sent_bytes(cls, tokens: Tokens) -> SentBytes | None:
        num_tokens, num_ranks = len(tokens.ids), tokens.placement.num_ranks
        dispatched = num_tokens * RowFormat(tokens.hidden_size, tokens.ids.shape[1], tokens.dtype).row_bytes
        combined = num_tokens * tokens.hidden_size * tokens.dtype.itemsize
        return SentBytes(
            dispatch=dispatched * (num_ranks - 1),
            combine=combined * (num_ranks - 1),
            received=0,  # it comes into what is reserved
            reserved=(dispatched + combined) * num_ranks * tokens.num_ubatches,
        )

    @property
    def _slots(self) -> _Slots:
        assert self._opened is not None, "open comes before the first transfer"
        return self._opened


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN
