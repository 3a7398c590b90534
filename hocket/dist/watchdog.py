"""Notices that this rank computes without getting on. Knows from the rank's record what it does, and no tensors.

Waits for others have time-outs of their own; what never returns, in a greenlet above all, can only be seen from another
thread. That one sleeps, and counts its looks instead of reading a clock: a stopped process has not used its time up.
Each look also tells the record that the process runs, by which the front knows a rank that is slow from a stopped one.
"""

from __future__ import annotations

import faulthandler
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hocket.dist.record import COMPUTES, Record

_LOOKS = 20
"""Per limit, at least. A look costs a few µs."""
_BEAT_S = 0.5
"""At most between two looks."""


class Watchdog:
    """Calls `on_stuck`, once, on a thread of its own when the rank has been computing for `limit_s` seconds without a
    step or a transfer that began or ended.
    """

    def __init__(self, record: Record, limit_s: float, on_stuck: Callable[[], None]) -> None:
        self._record = record
        self._num_looks = max(_LOOKS, math.ceil(limit_s / _BEAT_S))
        self._interval_s = limit_s / self._num_looks
        self._on_stuck = on_stuck
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        seen, unchanged = (-1, -1), 0
        while not self._closed.wait(self._interval_s):
            record = self._record
            record.beat()
            now = record.steps, record.transfers
            waits = record.state != COMPUTES or record.is_busy
            unchanged = 0 if waits or now != seen else unchanged + 1
            seen = now
            if unchanged >= self._num_looks:
                self._on_stuck()
                return

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._thread.join()


@contextmanager
def time_limit(limit_s: float, on_late: Callable[[], None]) -> Iterator[None]:
    """Call `on_late` on a thread of its own if what is done inside is not over after `limit_s` seconds."""
    timer = threading.Timer(limit_s, on_late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def last_resort(limit_s: float) -> Iterator[None]:
    """End this process if what is done inside is not over after `limit_s` seconds, also where a library lets no other
    thread run meanwhile; where it was goes to standard error."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
