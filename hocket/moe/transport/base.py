"""What every transport is: tokens out to the ranks of their experts and results back. Knows no backend.

Shapes: T a rank's rows, N rows received, D hidden, K top-k, E experts of all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hocket.config.engine import EngineConfig
from hocket.errors import StepDesync
from hocket.moe.base import TokenLayout
from hocket.moe.experts.base import Experts
from hocket.moe.grouped import GroupedRows
from hocket.moe.placement import ExpertPlacement
from hocket.ubatch.transfer import Transfer


class Handle:
    """What a transport must remember from one `prepare` to its `finalize`; each backend has its own subclass."""

    __slots__ = ()


class Received(ABC):
    """What this rank's experts get; x: the rows, in the transport's own layout; handle: what `finalize` takes."""

    __slots__ = ()
    x: Tensor
    handle: Handle

    @abstractmethod
    def through(self, experts: Experts) -> Tensor:
        """What `finalize` takes: the experts' results, in the layout of x."""

    @abstractmethod
    def with_handle(self, handle: Handle) -> Received:
        """The same with another handle."""

    def nothing(self) -> Tensor:
        """What `finalize` takes where there are no results: zeros."""
        return torch.zeros_like(self.x)


@dataclass(frozen=True, slots=True)
class Dispatched(Received):
    """x [N, D], ids int [N, K] and weights fp32 [N, K] as they were given to `prepare` (rows of all may be strided),
    also slots of other ranks' experts. Results are weighted sums."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    handle: Handle

    def through(self, experts: Experts) -> Tensor:
        return experts(self.x, self.ids, self.weights)  # type: ignore[no-any-return]

    def with_handle(self, handle: Handle) -> Dispatched:
        return replace(self, handle=handle)


@dataclass(frozen=True, slots=True)
class DispatchedByExpert(Received):
    """A row of its own for each slot of a token, expert by expert: x is [E, R, D]. Results, in `dtype`, are not
    weighted yet: that is for `finalize`."""

    rows: GroupedRows
    dtype: torch.dtype
    handle: Handle

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return self.rows.x

    def through(self, experts: Experts) -> Tensor:
        return experts.forward_grouped(self.rows)

    def nothing(self) -> Tensor:
        return self.x.new_zeros(self.x.shape, dtype=self.dtype)

    def with_handle(self, handle: Handle) -> DispatchedByExpert:
        return replace(self, handle=handle)


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """max_tokens: rows of a rank in one step; top_k: experts of a token; dtype: of hidden states; num_local_ranks: how
    many of the ranks are on this host; num_ubatches: calls that may be under way at once."""

    max_tokens: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype
    num_local_ranks: int
    num_ubatches: int = 1

    @classmethod
    def of(cls, config: EngineConfig, num_local_ranks: int) -> StepSizes:
        """Those of an engine."""
        return cls(
            max_tokens=config.scheduler.max_num_batched_tokens,
            hidden_size=config.model.hidden_size,
            top_k=config.model.moe.top_k,
            dtype=getattr(torch, config.dtype),
            num_local_ranks=num_local_ranks,
            num_ubatches=config.overlap.num_ubatches,
        )


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens whose way is to be counted: ids int64 [T, K] of their experts, in steps of num_ubatches. may_be_fp8: as
    after `send_fp8`."""

    placement: ExpertPlacement
    ids: Tensor
    hidden_size: int
    dtype: torch.dtype
    num_ubatches: int = 1
    may_be_fp8: bool = False


@dataclass(frozen=True, kw_only=True)
class SentBytes:
    """To other ranks, there and back; received: what the rows take that came, if the others send alike; reserved: what
    the transport holds all the time, if steps are no larger; is_fp8: whether dispatched rows are."""

    dispatch: int
    combine: int
    received: int
    reserved: int = 0
    is_fp8: bool = False


class Transport(ABC):
    """Moves tokens between the ranks that share experts.

    Every rank calls `prepare` and `finalize` equally often and in the same order, also with no tokens at all. All
    state of a call is in the transfer and its handle, so several may be under way at once and one instance serves all
    layers.
    """

    name: ClassVar[str]
    requires_padding: ClassVar[bool]
    """Whether ranks exchange fixed shapes, so that every rank must know `layout.num_padded_max`."""
    launch_blocks: ClassVar[bool] = False
    """Whether `send` reads from the device what it sends, so that its host waits for the compute before it."""
    captures: ClassVar[bool] = False
    """Whether a CUDA graph can hold its transfers."""
    is_apart: ClassVar[bool] = False
    """Whether transfers have a `receive` of their own."""
    closes_together: ClassVar[bool] = False
    """Whether `close` waits for all ranks, and for ever where one is gone."""
    max_sms: ClassVar[int | None] = None
    """How many multiprocessors of a GPU its transfers can take at most; None: as many as NCCL may in its group."""

    @abstractmethod
    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Received]:
        """The transfer of tokens to the ranks of their experts.

        x [T, D]; topk_ids int64 [T, K] in [-1, E), rows or slots of -1 go nowhere; topk_weights fp32 [T, K].

        Raises:
            HocketError: an id is out of range (checked on a CPU only).
        """

    @abstractmethod
    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        """The transfer back of expert_out, this rank's results for the rows it got (`Received.through`); its result
        adds up what all ranks computed for each of this rank's rows, in fp32 where the backend allows: [T, D] in
        expert_out's dtype.
        """

    def limit_sms(self, num_sms: int) -> Callable[[], object]:
        """Let transfers that are launched from now on take at most num_sms ≤ max_sms multiprocessors, where that can
        be said while the engine runs; what it returns brings back what was found. NCCL's were told at start.
        """
        return _nothing

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        """Why it cannot run on such a device here, or None where it can."""
        return None

    @classmethod
    def sent_bytes(cls, tokens: Tokens) -> SentBytes | None:
        """What rank 0 sends for `tokens`, as arithmetic; None: it can be run anywhere, so that it can be asked."""
        return None

    def open(self, sizes: StepSizes) -> None:
        """Make room for steps of up to these sizes, equal on all ranks, which call it together before the first
        `prepare`. Only some need any.

        Raises:
            BackendUnavailable, ConfigError, CapacityError: it cannot run steps of these sizes here.
        """
        return

    def send_fp8(self) -> None:
        """From now on rows may travel in fp8: all experts take such rows (`Experts.takes_fp8_rows`), on all ranks."""
        return

    def close(self) -> None:
        """Give back what `open` took, on all ranks together and after the last transfer."""
        return


def _nothing() -> None:
    """There was nothing to change."""


def most_received(num_ranks: int, num_padded_max: int) -> int:
    """Rows that a dispatch can bring: all of all ranks. For so many there is room where the host is not told how many
    come."""
    return num_ranks * num_padded_max


def check_numbers(mine: int, theirs: Iterable[Tensor]) -> None:
    """Raise StepDesync unless all that came carries the number of this rank's transfer: names the first rank whose
    does not. theirs: of each rank, in rank order, the numbers in what it sent, integers of any shape, on the host.

    Memory that a message was too short to fill holds no number, or one of another transfer.
    """
    for rank, numbers in enumerate(theirs):
        if not bool((numbers == mine).all()):
            raise StepDesync(f"what rank {rank} sent is not of transfer {mine}, which this rank is at")
