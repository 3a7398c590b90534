"""Runs the unchanged model on each ubatch of a step, alternating at the sparse layers. Knows no model in particular."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hocket.dist.record import Record
from hocket.errors import OverlapError, UBatchFailed
from hocket.models.base import CausalLM, UBatchInputs
from hocket.moe.layer import MoELayer
from hocket.overlap.thread_state import make_baton, thread_setup
from hocket.ubatch import context as ubatch
from hocket.ubatch.baton import Baton, SoloBaton
from hocket.ubatch.context import UBatchContext
from hocket.ubatch.lanes import InlineLane, Lane, WorkerLane

EXECUTORS = ("greenlet", "thread")
_HARD = OverlapError
"""After these the collectives of the step cannot be finished."""
_GRACE_S = 2.0
"""Collectives and the rank's watchdog know better who is late: they come first."""


class UBatchExecutor:
    """Runs a step of one or more ubatches.

    kind: one of EXECUTORS. size: how many ubatches at most. timeout_s: how long one may hold the baton.
    """

    def __init__(
        self,
        model: CausalLM,
        kind: str,
        size: int,
        timeout_s: float,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        self.comm_ns = self.exposed_ns = 0  # of the last step, see UBatchContext
        self._model = model
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self._solo: tuple[Baton, Lane] = (SoloBaton(), InlineLane(record))
        self._alternating: tuple[Baton, Lane] | None = None
        if size > 1:
            last_resort_s = timeout_s + _GRACE_S
            lane = WorkerLane(last_resort_s, thread_setup(device), record=record)
            self._alternating = (make_baton(kind, size, last_resort_s, device), lane)

    def run(self, ubatches: tuple[UBatchInputs, ...], kv_cache: list[Tensor]) -> list[Tensor]:
        """Final hidden states [T, D] of each ubatch, by index.

        Raises:
            UBatchFailed: a ubatch raised in a compute stage; all collectives of the step took place nevertheless.
            BatonTimeout, RankLost, StepDesync, OverlapError: the step broke off; this rank cannot go on.
        """
        pair = self._alternating if len(ubatches) > 1 else self._solo
        assert pair is not None, "more ubatches than the executor was made for"
        baton, lane = pair
        contexts: list[UBatchContext] = []
        for idx in range(len(ubatches)):
            contexts.append(UBatchContext(idx, baton, lane, contexts))
        bodies = [self._body(c, inputs, kv_cache) for c, inputs in zip(contexts, ubatches, strict=True)]
        outcomes = baton.run(bodies)
        self.comm_ns = sum(context.comm_ns for context in contexts)
        self.exposed_ns = sum(context.exposed_ns for context in contexts)
        for outcome in outcomes:
            if isinstance(outcome.error, _HARD):
                raise outcome.error
        for idx, outcome in enumerate(outcomes):
            if outcome.error is not None:
                cause = f"{type(outcome.error).__name__}: {outcome.error}"
                raise UBatchFailed(f"ubatch {idx}, after {contexts[idx].layers_done} sparse layers: {cause}") from (
                    outcome.error
                )
        return [outcome.value for outcome in outcomes]

    def _body(self, context: UBatchContext, inputs: UBatchInputs, kv_cache: list[Tensor]) -> Callable[[], Tensor]:
        def body() -> Tensor:
            ubatch.enter(context)
            try:
                hidden: Tensor = self._model(inputs, kv_cache)
            except _HARD:
                raise
            except Exception:
                # The other ranks go through all layers of this step: so does this ubatch, without tokens.
                done = context.layers_done
                for layer in self._layers[done:]:
                    layer.join(inputs.layout)
                context.layers_done = done  # where it failed
                raise
            finally:
                context.run_hooks()
                ubatch.enter(None)
            return hidden

        return body

    @property
    def holder(self) -> tuple[int, int | None]:
        """(ubatch whose turn it is, its thread where it has one of its own); −1 outside of `run`."""
        if self._alternating is None:
            return -1, None
        baton = self._alternating[0]
        return baton.holder, baton.thread_of(baton.holder)

    def close(self) -> None:
        """End the workers."""
        if self._alternating is not None:
            for part in self._alternating:
                part.close()
