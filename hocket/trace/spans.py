"""What ran when, on which lane: the stages of ubatches as spans. Knows no tensors, no engine, no schedule.

Layers name the stage they begin; where the step is not recorded that costs one look-up and one assignment.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Stage(StrEnum):
    """The parts of one sparse layer of one ubatch. Compute: A0, A1, M, S; communication: D, C (compute packs them)."""

    QKV = "A0"  # the projections into attention, and what lies between two layers
    ATTENTION = "A1"  # core attention, its output projection, the router
    DISPATCH = "D"
    EXPERTS = "M"
    COMBINE = "C"
    SHARED = "S"
    HAND_OVER = "|"
    KERNEL = "K"  # one whose stage nobody knows: of a replayed CUDA graph

    @property
    def label(self) -> str:
        """For people."""
        return _LABELS[self]

    @property
    def short(self) -> str:
        """For pictures."""
        return _SHORT[self]


_SHORT = {
    Stage.QKV: "qkv",
    Stage.ATTENTION: "attn",
    Stage.DISPATCH: "dispatch",
    Stage.EXPERTS: "experts",
    Stage.COMBINE: "combine",
    Stage.SHARED: "shared",
    Stage.HAND_OVER: "hand-over",
    Stage.KERNEL: "kernel",
}
_LABELS = {
    Stage.QKV: "qkv projection",
    Stage.ATTENTION: "attention or router",
    Stage.DISPATCH: "dispatch",
    Stage.EXPERTS: "experts",
    Stage.COMBINE: "combine",
    Stage.SHARED: "shared experts",
    Stage.HAND_OVER: "hand-over",
    Stage.KERNEL: "kernel",
}
COMPUTE, COMM = "compute", "comm"
HOST, EVENTS, KERNELS = "host", "events", "kernels"
"""Where a step's times are from: the host's clock, a GPU's events between launches, or a profile of its kernels."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Span:
    """One stage of a ubatch on a lane, in the order of launching. layer: sparse layers before it.

    part, on the comm lane: "send" or "recv", or "flight": from the start of the send until the data was here.
    Times are those of time.perf_counter_ns, 0 while unknown. kernel: the beginning of its name, where it is one.
    """

    lane: str
    ubatch: int
    layer: int
    stage: Stage
    part: str = ""
    start_ns: int = 0
    stop_ns: int = 0
    kernel: str = ""

    @property
    def name(self) -> str:
        """Such as "ub0 attn", "ub1 dispatch send"; "ub1 dispatch pack" is the compute before it."""
        if self.stage is Stage.KERNEL:
            return self.kernel
        part = "pack" if self.lane == COMPUTE and self.stage in (Stage.DISPATCH, Stage.COMBINE) else self.part
        return f"ub{self.ubatch} {self.stage.short} {part}".rstrip()


@dataclass(slots=True)
class HandOver:
    """One ubatch stops, the next may begin: from the end of the one's work to the start of the other's."""

    source: int
    target: int
    start_ns: int
    stop_ns: int = 0


@dataclass(slots=True)
class Step:
    """A recorded step of a rank: the model's forward pass, as ubatches (1: unsplit). phase: "prefill" or "decode".

    number: of the step, equal on ranks that share experts. exchange_ns: when the rank entered the step exchange before
    it, and when it left it. clock: names the one that all times are of, a host's. source: HOST, EVENTS or KERNELS.
    """

    phase: str
    num_ubatches: int
    num_tokens: int
    start_ns: int = 0
    stop_ns: int = 0
    spans: list[Span] = field(default_factory=list)
    hand_overs: list[HandOver] = field(default_factory=list)
    clock: str = ""
    number: int = 0
    exchange_ns: tuple[int, int] = (0, 0)
    source: str = HOST


class Profile(Protocol):
    """Of a GPU's kernels while steps are recorded (`worker/kernel_profile.py`)."""

    is_running: bool

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def passed(self, *, is_over: bool) -> None:
        """Another step begins; is_over: none will be recorded any more."""

    def mark(self, step: Step | None) -> None:
        """Launch the mark before a step, or the one behind it (None)."""


def host_ns() -> int:
    """Now, by the host's clock."""
    return time.perf_counter_ns()


def clock_of_host() -> str:
    """What tells this host's clock from others': on Linux it runs since the host was started, which has a name."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


@dataclass(slots=True)
class Recorder:
    """Which steps are recorded: after the first `skip` the next `limit` (None: all), of `phase` ("": of any)."""

    phase: str = ""
    skip: int = 0
    limit: int | None = None
    steps: list[Step] = field(default_factory=list)
    clock: str = field(default_factory=clock_of_host)
    number: int = 0  # of the next step, as the following
    exchange_ns: tuple[int, int] = (0, 0)
    profile: Profile | None = None

    @property
    def spans(self) -> list[Span]:
        """Of all steps recorded so far."""
        return [span for step in self.steps for span in step.spans]

    @property
    def finished(self) -> list[Step]:
        """Steps that came to their end, with the spans whose times are known."""
        steps = [step for step in self.steps if step.stop_ns]
        for step in steps:
            step.spans = [span for span in step.spans if span.stop_ns]
            step.hand_overs = [one for one in step.hand_overs if one.stop_ns]
        return steps

    def begin(self, phase: str, num_ubatches: int, num_tokens: int) -> Step | None:
        """A step begins; None where it is not to be recorded."""
        is_full = len(self.steps) == self.limit
        if self.profile is not None:
            self.profile.passed(is_over=is_full)
        if self.phase not in ("", phase) or is_full:
            return None
        if self.skip > 0:
            self.skip -= 1
            if self.skip == 0 and self.profile is not None:  # one early: starting it takes some ranks longer
                self.profile.start()
            return None
        begun = Step(phase, num_ubatches, num_tokens, start_ns=time.perf_counter_ns())
        begun.clock, begun.number, begun.exchange_ns = self.clock, self.number, self.exchange_ns
        self.steps.append(begun)
        return begun


class Track:
    """Where one ubatch is: its sparse layer and stage; and, where the step is recorded, where it has been.

    now: what stands for the present time in spans (`ubatch/stamps.py`: on a GPU it is known later).
    """

    __slots__ = ("_open", "_step", "failed", "layer", "now", "stage", "ubatch")

    def __init__(self, ubatch: int, step: Step | None = None, now: Callable[[], int] = host_ns) -> None:
        self.now = now
        self.ubatch = ubatch
        self.layer = 0
        self.stage = Stage.QKV
        self.failed: tuple[int, Stage] | None = None
        self._step = step
        self._open: Span | None = None

    def begin(self, stage: Stage) -> None:
        """The ubatch computes `stage` from now on."""
        self.stage = stage
        if self._step is not None:
            self._switch(self._step, stage)

    def _switch(self, step: Step, stage: Stage) -> None:
        opened = self._open
        if opened is not None and opened.stage is stage and opened.layer == self.layer:
            return
        self.pause()
        self._open = Span(COMPUTE, self.ubatch, self.layer, stage, start_ns=self.now())
        step.spans.append(self._open)

    def pause(self) -> None:
        """The ubatch computes nothing: it waits, or another one runs."""
        if self._open is not None:
            self._open.stop_ns = self.now()
            self._open = None

    def interrupt(self, start_ns: int, stop_ns: int) -> None:
        """From one time to the other the ubatch did not compute: its own thread ran a transfer."""
        opened = self._open
        if self._step is not None and opened is not None:
            opened.stop_ns = start_ns
            self._open = Span(COMPUTE, self.ubatch, opened.layer, opened.stage, start_ns=stop_ns)
            self._step.spans.append(self._open)

    def give(self, target: int) -> None:
        """The ubatch stops, and `target` runs next."""
        self.pause()
        if self._step is not None:
            self._step.hand_overs.append(HandOver(self.ubatch, target, self.now()))

    def take(self) -> None:
        """It is this ubatch's turn."""
        if self._step is not None and self._step.hand_overs:
            self._step.hand_overs[-1].stop_ns = self.now()

    def launched(self, stage: Stage, part: str) -> Span | None:
        """A piece of communication was launched; its times are filled in when they are known. None: not recorded."""
        if self._step is None:
            return None
        span = Span(COMM, self.ubatch, self.layer, stage, part)
        self._step.spans.append(span)
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
