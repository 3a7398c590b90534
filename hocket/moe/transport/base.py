"""What every transport is: tokens out to the ranks of their experts and results back. Knows no backend.

Shapes: T a rank's rows, N rows received, D hidden, K top-k, E experts of all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hocket.errors import StepDesync
from hocket.moe.base import TokenLayout
from hocket.ubatch.transfer import Transfer


class Handle:
    """What a transport must remember from one `prepare` to its `finalize`; each backend has its own subclass."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What this rank's experts get: x [N, D], ids int [N, K] and weights fp32 [N, K] as they were given to `prepare`
    (rows of all may be strided), also slots of other ranks' experts, and the handle that `finalize` takes."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    handle: Handle


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
    max_sms: ClassVar[int | None] = None
    """How many multiprocessors of a GPU its transfers can take at most; None: as many as NCCL may in its group."""

    @abstractmethod
    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        """The transfer of tokens to the ranks of their experts.

        x [T, D]; topk_ids int64 [T, K] in [-1, E), rows or slots of -1 go nowhere; topk_weights fp32 [T, K].

        Raises:
            HocketError: an id is out of range (checked on a CPU only).
        """

    @abstractmethod
    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        """The transfer back of expert_out [N, D], this rank's weighted sums for the rows it got; its result adds up
        what all ranks computed for each of this rank's rows, in fp32 where the backend allows: [T, D] in expert_out's
        dtype.
        """

    def limit_sms(self, num_sms: int) -> Callable[[], object]:
        """Let transfers that are launched from now on take at most num_sms ≤ max_sms multiprocessors, where that can
        be said while the engine runs; what it returns brings back what was found. NCCL's were told at start.
        """
        return _nothing


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
