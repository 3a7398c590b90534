"""Streams and events of a GPU that only note what is ordered behind what. For tests of launches on a CPU.

What a stream runs knows everything that came before it there, and what the events held that the stream waited for. Two
pieces of work of which neither knows the other may run at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 0)


class Stream:
    """`known`: what has been launched here, and what that waits for."""

    def __init__(self, device: torch.device = GPU, priority: int = 0) -> None:
        self.device = device
        self.known: set[Hashable] = set()

    def wait_event(self, event: Event) -> None:
        assert event.known is not None, "an event that was never recorded makes nobody wait"
        event.cuda.watch()
        self.known |= event.known

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


class Event:
    """What its stream knew when it was recorded."""

    cuda: FakeStreams

    def __init__(self, enable_timing: bool = False) -> None:
        assert self.cuda.may_time or not enable_timing, "nobody asked for times"
        self.known: frozenset[Hashable] | None = None
        self.is_timed = enable_timing
        self.tick = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        self.known = frozenset(stream.known)
        if self.is_timed:
            self.tick = len(self.cuda.timed)
            self.cuda.timed.append(stream)

    def elapsed_time(self, other: Event) -> float:
        """ms; every timed event comes 1 ms after the one recorded before it, on whatever stream."""
        return float(other.tick - self.tick)

    def synchronize(self) -> None:
        assert self.is_timed, "the host waits for an event"


@dataclass(frozen=True)
class Ran:
    """A piece of work: the stream it was launched on, and what it comes after."""

    stream: Stream
    after: frozenset[Hashable]


class FakeStreams:
    """In place of `torch.cuda`'s. Every thread has a stream of its own until it enters another one.

    watch: called before each launch. may_time: whether events may keep times, and so whether the host may wait for the
    device; timed: the stream of each that did.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: dict[Any, Ran] = {}  # in the order of launches
        self.watch: Callable[[], object] = lambda: None
        self.may_time = False
        self.timed: list[Stream] = []
        self._threads = threading.local()
        for name in ("stream", "current_stream", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", type("Event", (Event,), {"cuda": self}))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    def _synchronize(self, device: torch.device | None = None) -> None:
        assert self.may_time, "the host waits for the device"

    def current_stream(self, device: torch.device | None = None) -> Stream:
        if not hasattr(self._threads, "stream"):
            self._threads.stream = Stream()
        found: Stream = self._threads.stream
        return found

    def set_stream(self, stream: Stream) -> None:
        self._threads.stream = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._threads.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._threads.stream = before

    def run(self, what: Hashable) -> None:
        """`what` is launched on the current stream."""
        self.watch()
        stream = self.current_stream()
        self.ran[what] = Ran(stream, frozenset(stream.known))
        stream.known.add(what)

    def beside(self, what: Hashable) -> set[Any]:
        """What may run at the same time."""
        after = self.ran[what].after
        return {
            other for other, ran in self.ran.items() if other != what and other not in after and what not in ran.after
        }
