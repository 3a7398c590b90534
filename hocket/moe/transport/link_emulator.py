"""A transport over an emulated slow link: wraps another and stretches its transfers. For tests and demonstrations.

Every result that was measured over it must say so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hocket.moe.base import TokenLayout
from hocket.moe.transport.base import Handle, Received, Transport
from hocket.ubatch.transfer import Transfer

if TYPE_CHECKING:
    from hocket.moe.transport.link_copies import CopyDelay

T = TypeVar("T")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LinkHandle(Handle):
    """The inner transport's handle, and for how many of this rank's tokens the call is."""

    inner: Handle
    num_tokens: int


class LinkEmulator(Transport):
    """Each transfer takes `latency_us` + bytes sent / `gb_per_s`, and the link carries one at a time.

    token_bytes: bytes that count for each of this rank's rows, in a dispatch and in a combine, instead of those that
    the inner transport sends.

    Send and receive are apart: `send` runs the inner transfer and returns, `receive` waits until the link would have
    delivered it. A transfer that the inner transport needs longer for is not shortened.

    On a GPU (`device`) copies that take so long are what is waited for (`link_copies.py`), beside the inner transfer;
    the order of the transfers' stream has one at a time on the link.
    """

    name = "link_emulator"
    requires_padding = False  # an instance takes over its inner transport's, launch_blocks and, on a GPU, captures
    is_apart = True

    def __init__(
        self,
        inner: Transport,
        latency_us: float,
        gb_per_s: float,
        device: torch.device = _CPU,
        token_bytes: tuple[float, float] | None = None,
    ) -> None:
        self.inner = inner
        self.token_bytes = token_bytes
        self.latency_us = latency_us
        self.gb_per_s = gb_per_s
        self.requires_padding = inner.requires_padding  # type: ignore[misc]
        self.launch_blocks = inner.launch_blocks  # type: ignore[misc]
        self._free_at = 0.0  # when the link has delivered all that was sent
        self._delay: CopyDelay | None = None
        if device.type == "cuda":
            from hocket.moe.transport.link_copies import CopyDelay

            self._delay = CopyDelay(device)
            self.captures = inner.captures  # type: ignore[misc]
            self.max_sms = inner.max_sms  # type: ignore[misc]

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Received]:
        transfer = self.inner.prepare(x, topk_ids, topk_weights, layout)
        if self.token_bytes is None:
            return self._stretched(transfer)
        num_tokens, num_bytes = x.shape[0], round(x.shape[0] * self.token_bytes[0])

        def result() -> Received:
            found = transfer.result()
            return found.with_handle(LinkHandle(found.handle, num_tokens))

        return self._stretched(replace(transfer, result=result, num_bytes=lambda: num_bytes))

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        if self.token_bytes is None:
            return self._stretched(self.inner.finalize(expert_out, handle))
        assert isinstance(handle, LinkHandle)
        transfer = self.inner.finalize(expert_out, handle.inner)
        num_bytes = round(handle.num_tokens * self.token_bytes[1])
        return self._stretched(replace(transfer, num_bytes=lambda: num_bytes))

    def _seconds(self, num_bytes: int) -> float:
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)

    def _stretched(self, transfer: Transfer[T]) -> Transfer[T]:
        if self._delay is not None:
            return self._stretched_there(self._delay, transfer)
        delivered_at = 0.0

        def send() -> None:
            nonlocal delivered_at
            begin = max(time.perf_counter(), self._free_at)
            transfer.send()
            seconds = self._seconds(transfer.num_bytes())
            delivered_at = self._free_at = max(begin + seconds, time.perf_counter())

        def receive() -> None:
            nonlocal delivered_at
            if transfer.receive is not None:
                transfer.receive()
            left = delivered_at - time.perf_counter()
            if left > 0.0:
                time.sleep(left)
                delivered_at = time.perf_counter()  # a sleep may last longer

        return Transfer(send, transfer.result, transfer.num_bytes, receive, lambda: int(delivered_at * 1e9))

    def _stretched_there(self, delay: CopyDelay, transfer: Transfer[T]) -> Transfer[T]:
        """From the stream that the send is launched on to that of the receive. When it arrives the host does not
        know."""
        end: Any = None

        def send() -> None:
            nonlocal end
            begin = delay.mark()
            transfer.send()
            end = delay.start(begin, self._seconds(transfer.num_bytes()))

        def receive() -> None:
            if transfer.receive is not None:
                transfer.receive()
            delay.wait(end)

        return Transfer(send, transfer.result, transfer.num_bytes, receive)
