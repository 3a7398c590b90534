"""The comm lane: where transfers run, in order, beside the compute of the caller. Knows nothing of what they move.

On a CPU the lane is one worker thread and an event is a future; without overlap work runs inline. That of a GPU is in
`stream_lane.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar

from hocket.dist.record import Record
from hocket.errors import BatonTimeout

Work = Callable[[], None]
Setup = Callable[[], contextlib.AbstractContextManager[Any]]
"""What a thread enters before it works: the device, inference mode."""


class Pending(ABC):
    """A piece of work on a lane; started_ns and stopped_ns are known once it has run (time.perf_counter_ns)."""

    started_ns = 0
    stopped_ns = 0

    @abstractmethod
    def wait(self) -> None:
        """Make the caller's compute wait for it. Raises what the work raised."""


class Done(Pending):
    """Work that has already run, in the caller."""

    def __init__(self, work: Work) -> None:
        self.started_ns = time.perf_counter_ns()
        work()
        self.stopped_ns = time.perf_counter_ns()

    def wait(self) -> None:
        return None


class Queued(Pending):
    """Work that was launched on the caller's own stream of a device: what comes later there waits for it by itself.

    When it runs is not known to the host, so it has no times.
    """

    def __init__(self, work: Work) -> None:
        work()

    def wait(self) -> None:
        return None


class Lane(ABC):
    """Runs work in the order it was launched."""

    has_own_thread: ClassVar[bool]
    """Whether launching returns at once, also where the work makes its host wait."""
    knows_times: bool = True
    """Whether the host knows when its work ran, once it has waited for it."""

    def mark(self) -> Any:
        """What the caller has computed so far, for work launched later to wait for. None: by then it is computed."""
        return None

    @abstractmethod
    def launch(self, work: Work, name: str, after: Any = None) -> Pending:
        """Queue `work` behind all that was launched before and behind the mark `after`; `name` is for traces and
        errors."""

    @abstractmethod
    def close(self) -> None: ...


class InlineLane(Lane):
    """No lane of its own: work runs at once, in the caller; where `launches`, it only puts it on the device's queue."""

    has_own_thread = False

    def __init__(self, record: Record | None = None, *, launches: bool = False) -> None:
        self._record = record or Record()
        self._run: type[Done] | type[Queued] = Queued if launches else Done
        self.knows_times = not launches

    def launch(self, work: Work, name: str, after: Any = None) -> Pending:
        self._record.begin_transfer(name)
        pending = self._run(work)
        self._record.end_transfer()
        return pending

    def close(self) -> None:
        return None


class _Job(Pending):
    def __init__(self, work: Work, name: str, limit_s: float) -> None:
        self.work = work
        self.name = name
        self._error: BaseException | None = None
        self._limit_s = limit_s
        self._done = threading.Lock()
        self._done.acquire()

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Run unless the lane is `broken`; returns what broke it, now or before."""
        self.started_ns = time.perf_counter_ns()
        self._error = broken
        if broken is None:
            try:
                self.work()
            except BaseException as error:
                self._error = error
        self.stopped_ns = time.perf_counter_ns()
        self._done.release()
        return self._error

    def wait(self) -> None:
        if not self._done.acquire(timeout=self._limit_s):
            raise BatonTimeout(f"{self.name} did not end on the comm lane within {self._limit_s:g} s")
        self._done.release()  # may be waited for again
        if self._error is not None:
            raise self._error


class WorkerLane(Lane):
    """One daemon thread. The work must release the GIL while it waits (collectives and sleeps do).

    timeout_s: how long one may take on the lane, waiting in the queue included: the last resort, should work that has
    limits of its own not keep them.

    After a failure the lane is broken: what is launched later fails at once in the same way, so that nobody waits for
    a collective whose peers have gone.
    """

    has_own_thread = True

    def __init__(
        self,
        timeout_s: float,
        setup: Setup = contextlib.nullcontext,
        record: Record | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._record = record or Record()
        self._setup = setup
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="comm-lane", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        broken: BaseException | None = None
        with self._setup():
            while (job := self._jobs.get()) is not None:
                if broken is None:
                    self._record.begin_transfer(job.name)
                broken = job.run(broken)
                if broken is None:  # else the record stays at the transfer that failed
                    self._record.end_transfer()
                del job

    def launch(self, work: Work, name: str, after: Any = None) -> Pending:
        job = _Job(work, name, self._timeout_s)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(self._timeout_s)
