"""A transfer in its parts, and how a layer runs one: send, hand over, receive. Knows nothing of what is moved."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hocket.errors import HocketError, OverlapError, RankLost
from hocket.ubatch.context import current, hand_over, launch_of
from hocket.ubatch.guard import refuse_inside_operator
from hocket.ubatch.lanes import Done, Pending, Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transfer(Generic[T]):
    """send and receive run on the comm lane, in order; result runs on the compute lane after them.

    receive None: send does all of it. num_bytes: what this rank sends, known once `send` has run. arrived_ns: when the
    data was here (time.perf_counter_ns), where the transport knows it better than by the end of `receive`.
    """

    send: Work
    result: Callable[[], T]
    num_bytes: Callable[[], int]
    receive: Work | None = None
    arrived_ns: Callable[[], int] | None = None


class Running(Generic[T]):
    """A transfer whose `send` is on the lane."""

    def __init__(self, transfer: Transfer[T], name: str) -> None:
        self._context = current()
        if self._context is not None:
            if self._context.baton.size > 1:
                refuse_inside_operator()
            self._context.run_hooks()
        self._transfer = transfer
        self._name = name
        self._send = self._last = self._launch(transfer.send, "send")

    def _launch(self, work: Work, part: str) -> Pending:
        pending = launch_of(self._context, _named(work, self._name), f"{self._name} {part}")
        if self._context is not None and isinstance(pending, Done):
            self._context.exposed_ns += pending.stopped_ns - pending.started_ns
        return pending

    def hand_over(self) -> None:
        """Let the next ubatch run; it puts the receive on the lane."""
        hand_over(None if self._transfer.receive is None else self._receive)

    def _receive(self) -> None:
        assert self._transfer.receive is not None
        self._last = self._launch(self._transfer.receive, "recv")

    def finish(self) -> T:
        """Wait for the lane and give the result. Raises what the work raised."""
        asked = time.perf_counter_ns()
        self._last.wait()
        context = self._context
        if context is not None:
            arrived_ns = self._transfer.arrived_ns
            arrived = self._last.stopped_ns if arrived_ns is None else arrived_ns()
            context.comm_ns += arrived - self._send.started_ns
            context.exposed_ns += max(self._last.stopped_ns - max(asked, self._send.started_ns), 0)
        return self._transfer.result()


def _named(work: Work, name: str) -> Work:
    """`work` whose failure is that of a collective: another rank is gone or late, and this one cannot go on."""

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            raise RankLost(f"a rank is late or gone: {name} failed: {_first_sentence(error)}") from error
        except HocketError:
            raise
        except Exception as error:  # no peer is to blame, but none of them can go on either
            raise OverlapError(f"{name} failed: {type(error).__name__}: {error}") from error

    return run


def _first_sentence(error: RuntimeError) -> str:
    """What torch says went wrong, without the place in its sources before it and the advice after it."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]
