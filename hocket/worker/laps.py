"""Where a step's time goes: cuts it into named parts. Knows nothing of what the parts do."""

from __future__ import annotations

import time

from hocket.dist.exchange import Table, now_us
from hocket.overlap.vote import Row

PARTS = ("schedule", "exchange", "wait", "prepare", "forward", "sample", "commit", "channel")
"""exchange: the exchange itself, from the last rank's arrival on; wait: for ranks that came later than this one;
channel: between steps."""


class Laps:
    """One step's durations by part, in µs. `ended_at`: when the step before ended, if this one follows it at once."""

    __slots__ = ("_at", "us")

    def __init__(self, ended_at: float | None) -> None:
        self._at = time.perf_counter()
        self.us = {"channel": 0.0 if ended_at is None else (self._at - ended_at) * 1e6}

    def end(self, part: str) -> float:
        """`part` ends, for the first time in this step or again, and the next one begins; returns when
        (time.perf_counter)."""
        now = time.perf_counter()
        self.us[part] = self.us.get(part, 0.0) + (now - self._at) * 1e6
        self._at = now
        return now

    def end_exchange(self, table: Table) -> float:
        """The exchange ends, having brought `table`: what it took is one part, waiting for later ranks another.
        Returns when, as `end`."""
        table_us = now_us()
        now = self.end("exchange")
        self.us["exchange"], self.us["wait"] = split_exchange(table, table_us, self.us["exchange"])
        return now


def split_exchange(table: Table, table_us: int, total_us: float) -> tuple[float, float]:
    """(µs from the last rank's arrival until the table was here at `table_us`, µs waited for that arrival).

    Arrival times are comparable between ranks of one host only; the sum is always this rank's own measurement.
    """
    since = min((table_us - column[Row.ARRIVAL_US]) & 0x7FFFFFFF for column in table)
    exchange = min(float(since), total_us)
    return exchange, total_us - exchange
