"""What a layer may call while ubatches alternate; all of it does nothing special when they do not.

A ubatch's context is found through a ContextVar, which threads and greenlets each have their own of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hocket.trace import spans
from hocket.trace.spans import Stage, Step, Track
from hocket.ubatch import guard
from hocket.ubatch.baton import Baton
from hocket.ubatch.lanes import Done, Lane, Pending, Work
from hocket.ubatch.times import StepTimes

Hook = Callable[[], None]


_ALONE = (Stage.DISPATCH, Stage.EXPERTS, Stage.COMBINE, Stage.SHARED)


@dataclass(eq=False)
class UBatchContext:
    """One ubatch of the running step: its index, the baton, the shared comm lane, and its pending receive hooks.

    order: the stages and hand-overs of a sparse layer behind attention. recorded: where its spans go, with times by
    `now`. times: the step's, which all of its ubatches add to. track: where the ubatch is; its `layer` counts sparse
    layers whose collectives are over, after a failure the rest must still happen.
    """

    idx: int
    baton: Baton
    lane: Lane
    peers: list[UBatchContext] = field(repr=False)
    order: tuple[Stage, ...] = _ALONE
    recorded: Step | None = None
    now: Callable[[], int] = spans.host_ns
    times: StepTimes = field(default_factory=StepTimes)
    track: Track = field(init=False)
    hooks: deque[Hook] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.track = Track(self.idx, self.recorded, self.now)

    def give(self, following: int) -> None:
        """This ubatch stops, and `following` runs next."""
        self.track.give(following)
        self.times.give()

    def take(self) -> None:
        """It is this ubatch's turn."""
        self.times.take()
        self.track.take()

    def run_hooks(self) -> None:
        """Run what other ubatches left for this one, oldest first."""
        while self.hooks:
            self.hooks.popleft()()


_current: ContextVar[UBatchContext | None] = ContextVar("ubatch", default=None)


def current() -> UBatchContext | None:
    """The context of the ubatch that calls, None without overlap."""
    return _current.get()


def enter(context: UBatchContext | None) -> None:
    """Make `context` that of the calling thread or greenlet; None: no ubatch."""
    _current.set(context)
    spans.enter(None if context is None else context.track)


def refuse_inside_operator() -> None:
    """Raise HocketError where the calling ubatch could not hand over: inside a torch operator written in Python."""
    context = _current.get()
    if context is not None and context.baton.size > 1:
        guard.refuse_inside_operator()


def order() -> tuple[Stage, ...]:
    """What a sparse layer does behind attention, in order; without a ubatch there is nobody to hand over to."""
    context = _current.get()
    return _ALONE if context is None else context.order


def layer_done() -> None:
    """A sparse layer's collectives are over."""
    context = _current.get()
    if context is not None:
        context.track.layer += 1


def mark() -> Any:
    """What the ubatch has computed so far, for a transfer of that to wait for (`Lane.mark`). Taken before a hand-over:
    afterwards it would hold what the others computed meanwhile, which the transfer should run beside."""
    context = _current.get()
    return None if context is None else context.lane.mark()


def launch_of(context: UBatchContext | None, work: Work, name: str, after: Any = None) -> Pending:
    """Run `work` on the comm lane behind the mark `after`; without overlap run it now."""
    if context is None:
        return Done(work)
    return context.lane.launch(work, f"ub{context.idx} {name}", after)


def hand_over(receive: Hook | None = None) -> None:
    """Let the next ubatch run, and come back when it is this one's turn. Without overlap: run `receive` and go on.

    `receive`, the second half of a transfer, is run by the next ubatch just before its own next transfer or before it
    ends; where no other ubatch is left it runs at once.
    """
    context = _current.get()
    following = -1 if context is None else context.baton.following(context.idx)
    if context is None or following == context.idx:
        if receive is not None:
            receive()
        return
    if receive is not None:
        context.peers[following].hooks.append(receive)
    context.give(following)
    context.baton.hand_over(context.idx)
    context.take()
