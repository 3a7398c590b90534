"""A transport that keeps the transfers of one step, so that its compute and its communication can each run alone.

Of each ubatch it keeps those of one sparse layer, the last, whose rows then stand for every layer's. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.moe.transport.base import Handle, Received, Transport
from hocket.trace.spans import Stage
from hocket.ubatch.context import current
from hocket.ubatch.transfer import T, Transfer

STAGES = (Stage.DISPATCH, Stage.COMBINE)
Key = tuple[Stage, int]
"""Of which ubatch."""


class KeptTransfers(Transport):
    """In place of `inner`, of all layers of a model.

    While it moves, transfers are `inner`'s, and kept under the name of the step. Else nothing moves: a transfer is
    packed as ever, but its result is again that of the kept one, so that the same rows reach the experts and the same
    sums come back. `ubatch`: whose transfers they are where no ubatch's context says so.
    """

    name = "kept"
    requires_padding = False

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.ubatch = 0
        self._moves = True
        self._step = ""
        self._steps: dict[str, dict[Key, Transfer[Any]]] = {}
        self._kept: dict[Key, Transfer[Any]] = {}
        self._results: dict[tuple[str, Key], Any] = {}

    def select(self, step: str, *, moves: bool) -> None:
        """Whose transfers these are from now on."""
        self._step, self._kept = step, self._steps.setdefault(step, {})
        self._moves = moves

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Received]:
        return self._given(Stage.DISPATCH, self.inner.prepare(x, topk_ids, topk_weights, layout))

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        return self._given(Stage.COMBINE, self.inner.finalize(expert_out, handle))

    def _given(self, stage: Stage, transfer: Transfer[T]) -> Transfer[T]:
        context = current()
        key = stage, self.ubatch if context is None else context.idx
        if self._moves:
            self._kept[key] = transfer
            return replace(transfer, result=partial(self._held, key, transfer.result))
        kept: Transfer[T] = self._kept[key]
        return Transfer(send=_nothing, result=kept.result, num_bytes=_no_bytes)

    def _held(self, key: Key, result: Callable[[], T]) -> T:
        """The result, whose memory stays: a captured step reads it after the transport has received into another."""
        found = result()
        self._results[self._step, key] = found
        return found

    def move(self, num_layers: int) -> None:
        """What is kept travels again, `num_layers` times: of every ubatch the dispatch, then of every one the combine.

        On the caller's stream, or in the caller's thread; one after the other, as on a lane.
        """
        for _ in range(num_layers):
            for stage in STAGES:
                for transfer in self._of(stage):
                    transfer.send()
                    if transfer.receive is not None:
                        transfer.receive()

    @property
    def num_bytes(self) -> int:
        """What this rank sends to others in one sparse layer, all ubatches together."""
        return sum(transfer.num_bytes() for transfer in self._kept.values())

    def _of(self, stage: Stage) -> list[Transfer[Any]]:
        return [self._kept[key] for key in sorted(self._kept, key=lambda key: key[1]) if key[0] is stage]


@contextmanager
def transfers_kept(layers: Sequence[MoELayer]) -> Iterator[KeptTransfers]:
    """The sparse layers of a model, which share a transport, have one that keeps its transfers while this is open."""
    inner = layers[0].transport
    kept = KeptTransfers(inner)
    for layer in layers:
        layer.transport = kept
    try:
        yield kept
    finally:
        for layer in layers:
            layer.transport = inner


def _nothing() -> None:
    return None


def _no_bytes() -> int:
    return 0
