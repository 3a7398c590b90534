"""A transfer in its parts, and how a layer runs one: send, hand over, receive. Knows nothing of what is moved."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hocket.errors import OverlapError, RankLost
from hocket.trace.spans import Span, Stage
from hocket.ubatch.context import current, hand_over, launch_of
from hocket.ubatch.lanes import Done, Pending, Queued, Work

T = TypeVar("T", covariant=True)
HARD = OverlapError
"""After these the collectives of a step cannot be finished."""


@dataclass(frozen=True, slots=True)
class Transfer(Generic[T]):
    """send and receive run on the comm lane, in order; result runs on the compute lane after them.

    receive None: send does all of it. num_bytes: what this rank sends to others, known once `send` has run.
    arrived_ns: when the data was here (time.perf_counter_ns), where the transport knows it better than by the end of
    `receive`.
    """

    send: Work
    result: Callable[[], T]
    num_bytes: Callable[[], int]
    receive: Work | None = None
    arrived_ns: Callable[[], int] | None = None


class Running(Generic[T]):
    """A transfer whose `send` is on the lane. stage: DISPATCH or COMBINE. ready: the mark of its inputs
    (`context.mark`); without one it waits for all that was computed until now."""

    def __init__(self, transfer: Transfer[T], stage: Stage, ready: Any = None) -> None:
        self._context = current()
        if self._context is not None:
            self._context.run_hooks()
        self._transfer = transfer
        self._stage = stage
        self._recorded: tuple[tuple[Span, Pending], ...] = ()
        self._receive_is_due = transfer.receive is not None
        if ready is None and self._context is not None:
            ready = self._context.lane.mark()
        self._send = self._last = self._launch(transfer.send, "send", ready)

    def _launch(self, work: Work, part: str, after: Any = None) -> Pending:
        context = self._context
        if context is None:
            return launch_of(None, _named(work, self._stage), f"{self._stage.label} {part}", after)
        span = context.track.launched(self._stage, part)
        if span is not None and not context.lane.knows_times:
            work = _stamped(work, span, context.now)
        pending = launch_of(context, _named(work, self._stage), f"{self._stage.label} {part}", after)
        if type(pending) is Done:
            context.times.of(self._stage).exposed_ns += pending.stopped_ns - pending.started_ns
            context.track.interrupt(pending.started_ns, pending.stopped_ns)
        if span is not None:
            if type(pending) is Queued:  # between compute, on its stream
                context.track.interrupt(span.start_ns, span.stop_ns)
            self._recorded += ((span, pending),)
        return pending

    def hand_over(self) -> None:
        """Let the next ubatch run; it puts the receive on the lane."""
        hand_over(self._receive if self._receive_is_due else None)

    def _receive(self) -> None:
        """Launch the receive, unless that has happened: the next ubatch or the one that needs it, who comes first."""
        if self._receive_is_due:
            assert self._transfer.receive is not None
            self._receive_is_due = False
            self._last = self._launch(self._transfer.receive, "recv")

    def finish(self, then: Stage) -> T:
        """Wait for the lane and give the result, with which the caller computes `then`. Raises what the work raised."""
        context = self._context
        if context is not None:
            context.track.pause()
        self._receive()
        asked = time.perf_counter_ns()
        self._last.wait()
        if context is not None:
            arrived_ns = self._transfer.arrived_ns
            arrived = self._last.stopped_ns if arrived_ns is None else arrived_ns()
            exposed_ns = max(self._last.stopped_ns - max(asked, self._send.started_ns), 0)
            traffic = context.times.of(self._stage)
            traffic.add(arrived - self._send.started_ns, exposed_ns, self._transfer.num_bytes())
            if self._recorded:
                self._record(arrived)
            context.track.begin(then)
        return self._transfer.result()

    def _record(self, arrived_ns: int) -> None:
        """Fill in what is known now of the spans on the comm lane."""
        assert self._context is not None
        if self._context.lane.knows_times:
            for span, pending in self._recorded:
                span.start_ns, span.stop_ns = pending.started_ns, pending.stopped_ns
        flight = self._context.track.launched(self._stage, "flight")
        assert flight is not None
        flight.start_ns, flight.stop_ns = self._recorded[0][0].start_ns, arrived_ns or self._recorded[-1][0].stop_ns


def cannot_go_on(stage: Stage, error: Exception) -> OverlapError:
    """What ends the group where this rank can no longer do its part of a layer's collectives: no peer is to blame, but
    none of them can go on either."""
    return OverlapError(f"{stage.label} failed: {type(error).__name__}: {error}")


def _named(work: Work, stage: Stage) -> Work:
    """`work` whose failure ends the group: where the process group reports it, another rank is gone or late."""

    def run() -> None:
        try:
            work()
        except HARD:
            raise
        except Exception as error:
            if not _is_of_group(error):
                raise cannot_go_on(stage, error) from error
            raise RankLost(f"a rank is late or gone: {stage.label} failed: {_first_sentence(error)}") from error

    return run


def _stamped(work: Work, span: Span, now: Callable[[], int]) -> Work:
    """`work` that notes on its own stream when it begins and ends."""

    def run() -> None:
        span.start_ns = now()
        work()
        span.stop_ns = now()

    return run


def _is_of_group(error: Exception) -> bool:
    """Whether torch.distributed says that it could not reach the others: by its own classes, or gloo in plain words."""
    return type(error).__name__.startswith("Dist") or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _first_sentence(error: Exception) -> str:
    """What torch says went wrong, without the place in its sources before it and the advice after it."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]
