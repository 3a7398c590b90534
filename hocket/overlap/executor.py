"""Runs the unchanged model on each ubatch of a step, alternating at the sparse layers. Knows no model in particular."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from hocket.attention.plan import Plan
from hocket.config.backends import EXECUTORS as EXECUTORS
from hocket.dist.record import Record
from hocket.errors import UBatchFailed
from hocket.models.base import CausalLM, UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.overlap import schedule
from hocket.overlap.failure import FailedStage
from hocket.overlap.sm_budget import UNLIMITED, SmBudget
from hocket.overlap.thread_state import comm_lane, inline_lane, make_baton, on_stream_of_caller
from hocket.trace.spans import Recorder, Stage, Step, Track, host_ns
from hocket.ubatch import context as ubatch
from hocket.ubatch.baton import Baton, Outcome, SoloBaton
from hocket.ubatch.context import UBatchContext
from hocket.ubatch.lanes import Lane, Setup
from hocket.ubatch.stamps import Stamps
from hocket.ubatch.times import StepTimes
from hocket.ubatch.transfer import HARD, cannot_go_on

_GRACE_S = 2.0
"""Collectives and the rank's watchdog know better who is late: they come first."""


class UBatchExecutor:
    """Runs a step of one or more ubatches.

    kind: one of EXECUTORS. size: how many ubatches at most. timeout_s: how long one may hold the baton. budget: what
    split steps run under. `recorder`: where the spans of the following steps go; None: nowhere. `schedules` by phase
    may be replaced.
    """

    def __init__(
        self,
        model: CausalLM,
        kind: str,
        size: int,
        timeout_s: float,
        device: torch.device,
        record: Record | None = None,
        budget: SmBudget = UNLIMITED,
    ) -> None:
        self.times = StepTimes()  # of the last step
        self.times_transfers = device.type == "cpu"  # elsewhere they only join a queue
        self.recorder: Recorder | None = None
        self._model = model
        self._device = device
        self.budget = budget
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self._solo: tuple[Baton, Lane] = (SoloBaton(), inline_lane(device, record))
        self._alternating: tuple[Baton, Lane] | None = None
        launch_blocks, has_own_thread = False, True
        if size > 1:
            last_resort_s = timeout_s + _GRACE_S
            lane = comm_lane(device, last_resort_s, record)
            self._alternating = (make_baton(kind, size, last_resort_s, device), lane)
            launch_blocks = any(layer.transport.launch_blocks for layer in self._layers)
            has_own_thread = lane.has_own_thread
        self.schedules = {
            phase: schedule.choose(phase, launch_blocks=launch_blocks, has_own_thread=has_own_thread)
            for phase in schedule.PHASES
        }

    def run(self, ubatches: tuple[UBatchInputs, ...], kv_cache: list[Tensor], phase: str) -> list[Tensor]:
        """Final hidden states [T, D] of each ubatch, by index. `phase`: one of schedule.PHASES, equal on all ranks.

        Raises:
            UBatchFailed: a ubatch raised in a compute stage; all collectives of the step took place nevertheless.
            BatonTimeout, RankLost, StepDesync, OverlapError: the step broke off; this rank cannot go on.
        """
        step = self._recorded(ubatches, phase)
        stamps = None
        if step is not None and self.recorder is not None and self.is_on_gpu:
            stamps = Stamps(self._device, self.recorder.profile)
            stamps.begin(step)
        now = host_ns if stamps is None else stamps.now
        contexts, baton = self._contexts(len(ubatches), phase, step, now)
        works = [
            partial(self._run, context, inputs, kv_cache) for context, inputs in zip(contexts, ubatches, strict=True)
        ]
        outcomes = self._alternate(contexts, baton, works)
        if stamps is not None and step is not None:
            stamps.end(step)
            _resolve(stamps, step, outcomes)
        elif step is not None:
            step.stop_ns = now()
        _raise_first(contexts, outcomes)
        return [outcome.value for outcome in outcomes]

    def _alternate(
        self, contexts: list[UBatchContext], baton: Baton, works: Sequence[Callable[[], Tensor]]
    ) -> list[Outcome]:
        """What became of each ubatch's work; on the stream of the caller, or that which the budget enters."""
        with self.budget.entered() if len(works) > 1 else nullcontext():
            surround = on_stream_of_caller(self._device)
            return baton.run([_body(*pair, surround) for pair in zip(contexts, works, strict=True)])

    def run_captured(
        self, ubatches: tuple[UBatchInputs, ...], kv_cache: list[Tensor], plans: Sequence[Plan]
    ) -> list[Tensor]:
        """The same of a decode whose attention is planned already, while it is captured: in the caller's thread or in
        those of the ubatches, as a capture follows streams. After a failure in it nothing more can be launched.

        Raises:
            UBatchFailed: what came first of all that was raised, also where it was a transfer that failed.
            BatonTimeout: a ubatch does not get on.
        """
        contexts, baton = self._contexts(len(ubatches), "decode", None)
        failures: list[UBatchFailed] = []
        works = [
            partial(self._run_planned, context, inputs, kv_cache, plan, failures)
            for context, inputs, plan in zip(contexts, ubatches, plans, strict=True)
        ]
        outcomes = self._alternate(contexts, baton, works)
        if failures:
            raise failures[0]
        _raise_first(contexts, outcomes)
        return [outcome.value for outcome in outcomes]

    def _recorded(self, ubatches: tuple[UBatchInputs, ...], phase: str) -> Step | None:
        """Where the spans of this step go; None: nowhere."""
        if self.recorder is None:
            return None
        return self.recorder.begin(phase, len(ubatches), sum(part.layout.num_tokens for part in ubatches))

    def _contexts(
        self, count: int, phase: str, step: Step | None, now: Callable[[], int] = host_ns
    ) -> tuple[list[UBatchContext], Baton]:
        """A context for each ubatch of a step, and the baton that they hand over."""
        pair = self._alternating if count > 1 else self._solo
        assert pair is not None, "more ubatches than the executor was made for"
        contexts: list[UBatchContext] = []
        self.times = StepTimes()
        for idx in range(count):
            contexts.append(UBatchContext(idx, *pair, contexts, self.schedules[phase].in_moe, step, now, self.times))
        return contexts, pair[0]

    def _run(self, context: UBatchContext, inputs: UBatchInputs, kv_cache: list[Tensor]) -> Tensor:
        """One ubatch's part of the step, in its own context."""
        track = context.track
        try:
            context.take()
            track.begin(Stage.QKV)
            hidden: Tensor = self._model(inputs, kv_cache)
        except HARD:
            raise
        except Exception:
            # The other ranks go through all layers of this step: so does this ubatch, without tokens.
            track.fail()
            self._join(track, inputs.layout)
            raise
        finally:
            track.pause()
            context.run_hooks()
            _leave(context)
        return hidden

    def _run_planned(
        self,
        context: UBatchContext,
        inputs: UBatchInputs,
        kv_cache: list[Tensor],
        plan: Plan,
        failures: list[UBatchFailed],
    ) -> Tensor:
        """One ubatch's part of a step that is captured; what fails goes to the end of `failures`."""
        track = context.track
        try:
            track.begin(Stage.QKV)
            hidden: Tensor = self._model(inputs, kv_cache, plan)
        except Exception as error:
            track.fail()
            failures.append(_failed(context, error))
            failures[-1].__cause__ = error
            if not isinstance(error, HARD):  # in a warm-up the other ranks go through all layers
                with suppress(Exception):
                    self._join(track, inputs.layout)
            raise
        finally:
            context.run_hooks()
            _leave(context)
        return hidden

    @contextmanager
    def patient(self, timeout_s: float) -> Iterator[None]:
        """While this is entered, a ubatch may hold the baton so long: kernels are compiled meanwhile."""
        if self._alternating is None:
            yield
            return
        baton = self._alternating[0]
        usual_s, baton.timeout_s = baton.timeout_s, timeout_s + _GRACE_S
        try:
            yield
        finally:
            baton.timeout_s = usual_s

    def _join(self, track: Track, layout: TokenLayout) -> None:
        """Take part in the collectives that are left of a step that failed here."""
        for layer in self._layers[track.layer :]:
            try:
                layer.join(layout)
            except HARD:
                raise
            except Exception as error:
                raise cannot_go_on(track.stage, error) from error

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def num_sparse_layers(self) -> int:
        return len(self._layers)

    @property
    def holder(self) -> tuple[int, int | None]:
        """(ubatch whose turn it is, its thread where it has one of its own); −1 outside of `run`."""
        if self._alternating is None:
            return -1, None
        baton = self._alternating[0]
        return baton.holder, baton.thread_of(baton.holder)

    def close(self) -> None:
        """End the workers, and what is recorded."""
        if self.recorder is not None and self.recorder.profile is not None:
            self.recorder.profile.stop()
        if self._alternating is not None:
            for part in self._alternating:
                part.close()


def _body(context: UBatchContext, work: Callable[[], Tensor], surround: Setup) -> Callable[[], Tensor]:
    """`work` in its ubatch's context."""

    def body() -> Tensor:
        with surround():
            ubatch.enter(context)
            try:
                return work()
            finally:
                ubatch.enter(None)

    return body


def _leave(context: UBatchContext) -> None:
    """Its ubatch ends: where another one is left, that one runs next."""
    following = context.baton.following(context.idx)
    if following != context.idx:
        context.give(following)


def _resolve(stamps: Stamps, step: Step, outcomes: list[Outcome]) -> None:
    """Times of a step; where one broke off nobody may wait for the device."""
    if any(outcome.error is not None for outcome in outcomes):
        step.stop_ns = 0
    else:
        stamps.resolve(step)


def _raise_first(contexts: list[UBatchContext], outcomes: list[Outcome]) -> None:
    """Raise what failed, if anything: what ends the group before what ends the step."""
    for outcome in outcomes:
        error = outcome.error
        if isinstance(error, HARD) or (error is not None and not isinstance(error, Exception)):
            raise error  # the latter: Ctrl-C and the like
    for context, outcome in zip(contexts, outcomes, strict=True):
        if outcome.error is not None:
            raise _failed(context, outcome.error) from outcome.error


def _failed(context: UBatchContext, error: BaseException) -> UBatchFailed:
    """What says where its ubatch failed."""
    assert context.track.failed is not None
    where = FailedStage(context.idx, *context.track.failed)
    text = str(error) if isinstance(error, HARD) else f"{type(error).__name__}: {error}"
    failed = UBatchFailed(f"{where}: {text}")
    failed.code = where.code
    return failed
