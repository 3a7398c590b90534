"""Turns: of n ubatches one runs at a time, and hands the baton to the next. Knows nothing of tensors or streams.

Two executors behind one interface. Threads: a worker per ubatch, kept between steps. Greenlets: all ubatches on the
caller's own thread, a hand-over is a switch of stacks.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import greenlet

from hocket.errors import BatonTimeout
from hocket.ubatch.lanes import Setup

Body = Callable[[], Any]
Switch = Callable[[], object]


@dataclass(slots=True)
class Outcome:
    """What a body returned, or what it raised."""

    value: Any = None
    error: BaseException | None = None


class Baton(ABC):
    """Runs bodies so that exactly one is running at any time; body 0 first, then in order round and round.

    `size`: how many bodies at most. `timeout_s`: how long one may hold the baton. `holder`: the body whose turn it is,
    −1 outside of `run`.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.holder = -1
        self._next: list[int] = []

    @abstractmethod
    def run(self, bodies: Sequence[Body]) -> list[Outcome]:
        """Run all bodies to their ends; outcomes by index, whatever the order in which they end.

        Raises:
            BatonTimeout: one did not hand over in time; names it. The baton cannot be used any more.
        """

    @abstractmethod
    def hand_over(self, idx: int) -> None:
        """Called by the running body `idx`: let the next unfinished one run, return when it is this one's turn."""

    @abstractmethod
    def close(self) -> None:
        """End what is kept between steps."""

    def thread_of(self, idx: int) -> int | None:
        """The thread that runs body `idx`, where that is not the caller of `run`."""
        return None

    def following(self, idx: int) -> int:
        """The next unfinished body after `idx`, itself if it is the only one."""
        return self._next[idx]

    def _begin(self, count: int) -> None:
        """Bodies 0 to count − 1 are there."""
        self._next = [*range(1, count), 0]

    def _end(self, idx: int) -> int:
        """Body `idx` has ended; whose turn it is now, −1 if all have."""
        after, self._next[idx] = self._next[idx], -1
        if after == idx:
            self.holder = -1
            return -1
        self._next[self._next.index(idx)] = after
        return after


class SoloBaton(Baton):
    """One body, on the caller's thread: there is nobody to hand over to."""

    def __init__(self) -> None:
        super().__init__(1, 0.0)
        self._begin(1)

    def run(self, bodies: Sequence[Body]) -> list[Outcome]:
        (body,) = bodies
        try:
            return [Outcome(value=body())]
        except Exception as error:
            return [Outcome(error=error)]

    def hand_over(self, idx: int) -> None:
        """It is always this one's turn."""

    def close(self) -> None:
        """Nothing is kept."""


class ThreadBaton(Baton):
    """One persistent thread per ubatch. `setup` is entered once by each thread (device, inference mode)."""

    def __init__(self, size: int, timeout_s: float, setup: Setup = contextlib.nullcontext) -> None:
        super().__init__(size, timeout_s)
        self._jobs: list[SimpleQueue[Body | None]] = [SimpleQueue() for _ in range(size)]
        self._turns = [threading.Lock() for _ in range(size)]  # held: not this one's turn
        self._ready = threading.Semaphore(0)
        self._done = threading.Lock()
        for lock in (*self._turns, self._done):
            lock.acquire()
        self._outcomes: list[Outcome] = []
        self._moves = 0  # hand-overs so far: a wait that sees it move goes on waiting
        self._threads = [
            threading.Thread(target=self._work, args=(idx, setup), name=f"ubatch-{idx}", daemon=True)
            for idx in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, idx: int, setup: Setup) -> None:
        with setup():
            while (body := self._jobs[idx].get()) is not None:
                self._ready.release()
                outcome = Outcome()
                try:
                    self._wait(self._turns[idx])
                    outcome.value = body()
                except BaseException as error:
                    outcome.error = error
                self._outcomes[idx] = outcome
                del body, outcome
                self._leave(idx)

    def run(self, bodies: Sequence[Body]) -> list[Outcome]:
        self._begin(len(bodies))
        self._outcomes = [Outcome() for _ in bodies]
        for idx, body in enumerate(bodies):
            self._jobs[idx].put(body)
        for _ in bodies:  # all are there before the first one runs
            if not self._ready.acquire(timeout=self.timeout_s):
                raise BatonTimeout(f"a ubatch worker did not start within {self.timeout_s:g} s")
        self._give(0)
        self._wait(self._done)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def thread_of(self, idx: int) -> int | None:
        return self._threads[idx].ident

    def _give(self, idx: int) -> None:
        self.holder = idx
        self._moves += 1
        self._turns[idx].release()

    def _wait(self, lock: threading.Lock) -> None:
        """Wait as long as the baton moves; a step of many hand-overs may take longer than one may keep it."""
        seen = self._moves
        while not lock.acquire(timeout=self.timeout_s):
            if self._moves == seen:
                raise BatonTimeout(f"ubatch {self.holder} has held the baton for {self.timeout_s:g} s")
            seen = self._moves

    def hand_over(self, idx: int) -> None:
        assert idx == self.holder, "only the ubatch whose turn it is hands over"
        after = self._next[idx]
        if after != idx:
            self._give(after)
            self._wait(self._turns[idx])

    def _leave(self, idx: int) -> None:
        after = self._end(idx)
        if after < 0:
            self._done.release()
        else:
            self._give(after)

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(self.timeout_s)


class GreenletBaton(Baton):
    """All bodies on the thread that calls `run`. A body that never hands over cannot be timed out from inside.

    `surround` is called at the start of `run`; what it returns is given each switch to make, so that it can keep the
    thread's state (grad mode and the like) from passing from one body to another.
    """

    def __init__(
        self, size: int, timeout_s: float, surround: Callable[[], Callable[[Switch], object]] | None = None
    ) -> None:
        super().__init__(size, timeout_s)
        self._greenlets: list[greenlet.greenlet] = []
        self._surround = surround
        self._around: Callable[[Switch], object] = _switch

    def run(self, bodies: Sequence[Body]) -> list[Outcome]:
        outcomes = [Outcome() for _ in bodies]
        self._around = _switch if self._surround is None else self._surround()
        self._begin(len(bodies))
        self._greenlets = [
            greenlet.greenlet(lambda body=body, idx=idx: self._work(body, idx, outcomes[idx]))
            for idx, body in enumerate(bodies)
        ]
        after = 0
        while after >= 0:
            self.holder = after
            after = self._end(self._greenlets[after].switch())  # comes back when a body ends
        self._greenlets = []
        return outcomes

    def _work(self, body: Body, idx: int, outcome: Outcome) -> int:
        try:
            outcome.value = body()
        except BaseException as error:
            outcome.error = error
        return idx

    def hand_over(self, idx: int) -> None:
        assert idx == self.holder, "only the ubatch whose turn it is hands over"
        after = self._next[idx]
        if after != idx:
            self.holder = after
            self._around(self._greenlets[after].switch)

    def close(self) -> None:
        """Nothing is kept."""


def _switch(switch: Switch) -> object:
    return switch()
