"""What ran when, on which lane: the stages of ubatches as spans. Knows no tensors, no engine, no schedule.

Layers name the stage they begin; without a recorder that costs one look-up and one assignment.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """The parts of one sparse layer of one ubatch. Compute: A0, A1, M, S; communication: D, C (compute packs them)."""

    QKV = "A0"  # the projections into attention, and what lies between two layers
    ATTENTION = "A1"  # core attention, its output projection, the router
    DISPATCH = "D"
    EXPERTS = "M"
    COMBINE = "C"
    SHARED = "S"
    HAND_OVER = "|"

    @property
    def label(self) -> str:
        """For people."""
        return _LABELS[self]


_LABELS = {
    Stage.QKV: "qkv projection",
    Stage.ATTENTION: "attention or router",
    Stage.DISPATCH: "dispatch",
    Stage.EXPERTS: "experts",
    Stage.COMBINE: "combine",
    Stage.SHARED: "shared experts",
    Stage.HAND_OVER: "hand-over",
}
COMPUTE, COMM = "compute", "comm"


@dataclass(slots=True)
class Span:
    """One stage of a ubatch on a lane, in the order of launching. layer: sparse layers before it.

    part, on the comm lane: "send" or "recv", or "flight": from the start of the send until the data was here.
    Times are those of time.perf_counter_ns, 0 while unknown.
    """

    lane: str
    ubatch: int
    layer: int
    stage: Stage
    part: str = ""
    start_ns: int = 0
    stop_ns: int = 0


@dataclass(slots=True)
class Recorder:
    """Spans of the steps recorded so far."""

    spans: list[Span] = field(default_factory=list)


class Track:
    """Where one ubatch is: its sparse layer and stage; and, with a recorder, where it has been."""

    __slots__ = ("_open", "_recorder", "failed", "layer", "stage", "ubatch")

    def __init__(self, ubatch: int, recorder: Recorder | None = None) -> None:
        self.ubatch = ubatch
        self.layer = 0
        self.stage = Stage.QKV
        self.failed: tuple[int, Stage] | None = None
        self._recorder = recorder
        self._open: Span | None = None

    def begin(self, stage: Stage) -> None:
        """The ubatch computes `stage` from now on."""
        self.stage = stage
        if self._recorder is not None:
            self._switch(self._recorder, stage)

    def _switch(self, recorder: Recorder, stage: Stage) -> None:
        opened = self._open
        if opened is not None and opened.stage is stage and opened.layer == self.layer:
            return
        self.pause()
        self._open = Span(COMPUTE, self.ubatch, self.layer, stage, start_ns=time.perf_counter_ns())
        recorder.spans.append(self._open)

    def pause(self) -> None:
        """The ubatch computes nothing: it waits, or another one runs."""
        if self._open is not None:
            self._open.stop_ns = time.perf_counter_ns()
            self._open = None

    def launched(self, stage: Stage, part: str) -> Span | None:
        """A piece of communication was launched; its times are filled in when they are known. None: not recorded."""
        if self._recorder is None:
            return None
        span = Span(COMM, self.ubatch, self.layer, stage, part)
        self._recorder.spans.append(span)
        return span

    def fail(self) -> None:
        """Remember where the first failure of the step was."""
        if self.failed is None:
            self.failed = self.layer, self.stage


_track: ContextVar[Track | None] = ContextVar("track", default=None)


def current() -> Track | None:
    """The track of the ubatch that calls; None outside of a step."""
    return _track.get()


def enter(track: Track | None) -> None:
    """Make `track` that of the calling thread or greenlet."""
    _track.set(track)


def begin(stage: Stage) -> None:
    """The ubatch that calls computes `stage` from now on."""
    track = _track.get()
    if track is not None:
        track.begin(stage)


def fail() -> None:
    """The stage that the calling ubatch is in has failed; only the first failure counts."""
    track = _track.get()
    if track is not None:
        track.fail()


def stage() -> Stage:
    """The stage that the calling ubatch is in; outside of a step the first."""
    track = _track.get()
    return Stage.QKV if track is None else track.stage
