"""The transport that works everywhere: uneven all-to-alls of torch.distributed. The oracle for all others.

Shapes: T this rank's rows, S rows sent, N rows received, D hidden, K top-k, n ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.dist import collectives
from hocket.moe.base import TokenLayout, check_ids, is_on_host
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Dispatched, Handle, Transport, check_numbers, most_received
from hocket.moe.transport.rows import INT32_MAX, RowFormat
from hocket.ubatch.transfer import Transfer


@dataclass(frozen=True, slots=True)
class TorchHandle(Handle):
    """Rows this rank sent, by destination: token_idx int64 [S]; rows per rank sent and received; T."""

    token_idx: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    num_rows: int


class _Dispatch:
    """One dispatch under way. The counts travel first and are read on the host, so it all runs on the comm lane.

    With them travels a number that counts transfers: ranks that are not at the same one must not take each other's
    bytes for rows. counts: int64 [n]. packed: uint8 [≥ S, row bytes]. room: where rows are received, uint8 [≥ N, row
    bytes], where there must be some before N is known.
    """

    def __init__(
        self,
        rank: int,
        group: collectives.Group | None,
        rows: RowFormat,
        counts: Tensor,
        packed: Tensor,
        number: int,
        room: Tensor | None,
    ) -> None:
        self._rank = rank
        self._group = group
        self._number = number
        self._rows = rows
        self._to_ranks = torch.stack((counts, torch.full_like(counts, number)), dim=1)  # int64 [n, 2]
        self._from_ranks = torch.empty_like(self._to_ranks)
        self._packed = packed
        self._room = room
        self.received: Tensor | None = None
        self.send_splits: list[int] = []
        self.recv_splits: list[int] = []

    def send(self) -> None:
        """Rows for each rank, with the number of this transfer, to the host; then the rows themselves.

        Raises:
            StepDesync: another rank is at another transfer; names it.
        """
        collectives.all_to_all(self._from_ranks, self._to_ranks, self._group)
        self.send_splits = self._to_ranks[:, 0].tolist()
        from_ranks = self._from_ranks.cpu()
        check_numbers(self._number, from_ranks[:, 1])
        self.recv_splits = from_ranks[:, 0].tolist()
        num_sent, num_received = sum(self.send_splits), sum(self.recv_splits)
        if self._room is None:
            self.received = self._packed.new_empty(num_received, self._rows.row_bytes)
        else:
            self.received = self._room[:num_received]
        sent = self._packed[:num_sent]
        collectives.all_to_all(self.received, sent, self._group, self.recv_splits, self.send_splits)

    def num_bytes(self) -> int:
        return (sum(self.send_splits) - self.send_splits[self._rank]) * self._rows.row_bytes


class TorchTransport(Transport):
    """A token travels once to each rank that holds at least one of its experts and comes back as one partial sum.

    Dispatch exchanges the counts (read on the host), then one message of rows per pair of ranks; combine is one
    message back per pair. Partial sums are added in fp32 in rank order. On a device `prepare` packs and makes room for
    as many rows as there can be: to learn their number it would wait for all that was launched before.
    """

    name = "torch"
    requires_padding = False
    launch_blocks = True

    def __init__(
        self, placement: ExpertPlacement, rank: int, group: collectives.Group | None, device: torch.device
    ) -> None:
        self._num_experts = placement.num_experts
        self._rank = rank
        self._group = group
        # One entry more than experts: index -1, a dropped slot, reads it and finds a rank that does not exist.
        self._rank_of = torch.tensor([*placement.rank_of, placement.num_ranks], device=device)
        self._ranks = torch.arange(placement.num_ranks, device=device)
        self._numbers = itertools.count()

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        check_ids(topk_ids, self._num_experts, "expert ids")
        owner = self._rank_of[topk_ids]
        is_wanted = (owner == self._ranks[:, None, None]).any(dim=-1)  # [n, T]
        rows = RowFormat(x.shape[1], topk_ids.shape[1], x.dtype)
        if is_on_host(x):
            _, token_idx = is_wanted.nonzero(as_tuple=True)  # by rank, then by token
            room = None
        else:
            token_idx = wanted_first(is_wanted, topk_ids.shape[1])
            most = most_received(len(self._ranks), layout.num_padded_max)
            room = x.new_empty(most, rows.row_bytes, dtype=torch.uint8)
        packed = rows.pack(x[token_idx], topk_ids[token_idx], topk_weights[token_idx], len(token_idx))
        number = next(self._numbers)
        under_way = _Dispatch(self._rank, self._group, rows, is_wanted.sum(dim=-1), packed, number, room)

        def result() -> Dispatched:
            assert under_way.received is not None
            splits = under_way.send_splits
            handle = TorchHandle(token_idx[: sum(splits)], splits, under_way.recv_splits, x.shape[0])
            return Dispatched(*rows.unpack(under_way.received), handle=handle)

        return Transfer(under_way.send, result, under_way.num_bytes)

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        assert isinstance(handle, TorchHandle)
        number = next(self._numbers) & INT32_MAX
        # On a device nobody could look at the numbers without waiting for it: the next dispatch, which waits, does.
        rows = RowFormat(expert_out.shape[1], 0, expert_out.dtype) if is_on_host(expert_out) else None
        sums = expert_out.contiguous() if rows is None else rows.pack_sums(expert_out, number)
        back = sums.new_empty(len(handle.token_idx), sums.shape[1])
        num_sent = sum(handle.recv_splits) - handle.recv_splits[self._rank]

        def result() -> Tensor:
            splits = handle.send_splits
            if rows is not None:
                check_numbers(number, torch.split(rows.numbers(back), splits))
            came = back if rows is None else rows.unpack(back)[0]
            out = torch.zeros(handle.num_rows, expert_out.shape[1], device=expert_out.device, dtype=torch.float32)
            for token_idx, part in zip(torch.split(handle.token_idx, splits), torch.split(came, splits), strict=True):
                out.index_add_(0, token_idx, part.float())  # no token twice in one rank's part: the order is fixed
            return out.to(expert_out.dtype)

        return Transfer(
            send=lambda: collectives.all_to_all(back, sums, self._group, handle.send_splits, handle.recv_splits),
            result=result,
            num_bytes=lambda: num_sent * sums.shape[1] * sums.itemsize,
        )


def wanted_first(is_wanted: Tensor, top_k: int) -> Tensor:
    """The tokens of is_wanted [n, T] that are true, by rank, then by token, as `nonzero` gives them: int64
    [min(n, top_k) · T], where top_k is how many ranks want a token at most. What follows them are tokens too, any.

    The host need not know how many there are.
    """
    num_ranks, num_tokens = is_wanted.shape
    most = min(num_ranks, top_k) * num_tokens
    flat = is_wanted.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, most)
    tokens = torch.arange(num_tokens, device=flat.device).repeat(num_ranks)
    return tokens.new_zeros(most + 1).scatter_(0, place, tokens)[:most]
