"""Where the time of a step's ubatches goes besides computing: transfers by kind, and hand-overs. Knows no lanes.

One value for all ubatches of a step, as one of them runs at a time. It costs a few additions for each transfer and two
looks at the clock for each hand-over, so it is always on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hocket.trace.spans import Stage


@dataclass(slots=True)
class Traffic:
    """Transfers of one kind. ns: from the start of the send to the end of the receive, each for itself: those that wait
    for others on the link count that time too. exposed_ns: the part of it that compute stood still for. num_bytes: what
    this rank sent."""

    ns: int = 0
    exposed_ns: int = 0
    num_bytes: int = 0

    def add(self, ns: int, exposed_ns: int, num_bytes: int) -> None:
        """One more transfer, or more of one."""
        self.ns += ns
        self.exposed_ns += exposed_ns
        self.num_bytes += num_bytes


@dataclass(slots=True)
class StepTimes:
    """Of one step on one rank. hand_over_ns: from one ubatch's last work to the next one's first; of the host, also
    where it only queues work for a device."""

    dispatch: Traffic = field(default_factory=Traffic)
    combine: Traffic = field(default_factory=Traffic)
    hand_over_ns: int = 0
    _given_ns: int = 0

    def of(self, stage: Stage) -> Traffic:
        """That of DISPATCH or COMBINE."""
        return self.dispatch if stage is Stage.DISPATCH else self.combine

    def give(self) -> None:
        """A ubatch stops, and another one runs next."""
        self._given_ns = time.perf_counter_ns()

    def take(self) -> None:
        """It is a ubatch's turn; the first one of a step was given it by nobody."""
        if self._given_ns:
            self.hand_over_ns += time.perf_counter_ns() - self._given_ns
            self._given_ns = 0

    def add(self, other: StepTimes) -> None:
        """Those of one more step."""
        for mine, its in ((self.dispatch, other.dispatch), (self.combine, other.combine)):
            mine.add(its.ns, its.exposed_ns, its.num_bytes)
        self.hand_over_ns += other.hand_over_ns

    @property
    def comm_ns(self) -> int:
        return self.dispatch.ns + self.combine.ns

    @property
    def exposed_ns(self) -> int:
        return self.dispatch.exposed_ns + self.combine.exposed_ns

    @property
    def comm_bytes(self) -> int:
        return self.dispatch.num_bytes + self.combine.num_bytes
