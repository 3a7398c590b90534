"""Waits until all ranks of a group have started or are ready, and says for whom. Starts and ends none; torch-free."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hocket.channel.messages import Hello, Progress, RankMessage, Ready
from hocket.dist.processes import REMIND_S, listed
from hocket.dist.servers import Others
from hocket.errors import RankLost

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
OnWait = Callable[[str], None]
"""Told "waiting for rank 1 to start", and again whenever one of those has come."""
Receive = Callable[[float], list[RankMessage]]
"""As RankGroup.receive."""
Arrival = TypeVar("Arrival", Hello, Ready)
_POLL_S = 0.1


class Arrivals(Generic[Arrival]):
    """A message of a kind from every rank. verb: what a rank does that sends it. reminds: whether the log names every
    few seconds who is missing, as somebody may have to do something about ranks that were not started here."""

    def __init__(
        self, kind: type[Arrival], ranks: Sequence[int], verb: str, *, on_wait: OnWait | None, reminds: bool
    ) -> None:
        self._kind: type[Arrival] = kind
        self._ranks = ranks
        self._verb = verb
        self._on_wait = on_wait
        self._reminds = reminds
        self._said = ""
        self._said_at = 0.0
        self._found: dict[int, Arrival] = {}

    def wait(self, receive: Receive, limit_s: float, on_progress: OnProgress | None = None) -> dict[int, Arrival]:
        """The messages, by rank. The limit counts from the last progress: loading a large model may take longer.

        Raises:
            RankLost: a rank has not sent it within the limit; names it. Whatever `receive` raises.
        """
        deadline = time.monotonic() + limit_s
        self._said_at = time.monotonic()
        while len(self._found) < len(self._ranks):
            now, missing = time.monotonic(), listed(set(self._ranks) - self._found.keys())
            if now > deadline:
                raise RankLost(f"rank {missing} did not {self._verb} within {limit_s:g} s (--startup-timeout)")
            self._say(missing, now, deadline)
            for message in receive(_POLL_S):
                if isinstance(message, self._kind):
                    self._found[message.rank] = message
                elif isinstance(message, Progress):
                    deadline = time.monotonic() + limit_s
                    if on_progress is not None and message.rank == self._ranks[0]:
                        on_progress(message.phase, message.done, message.total)
        return self._found

    def _say(self, missing: str, now: float, deadline: float) -> None:
        if self._on_wait is not None and missing != self._said:
            self._said = missing
            self._on_wait(f"waiting for rank {missing} to {self._verb}")
        if self._reminds and now > self._said_at + REMIND_S:
            self._said_at = now
            logger.warning("waiting for rank %s to %s, for up to %.0f s more", missing, self._verb, deadline - now)


def wait_for_others(hosts: Others, receive: Receive, on_wait: OnWait | None) -> None:
    """Until the ranks behind other servers are ready too: a step with these would wait for them. Each server has a
    limit for its own, and `receive` raises where one of them has gone."""
    hosts.ready()
    said, said_at = "", time.monotonic()
    while missing := listed(hosts.unready):
        if on_wait is not None and missing != said:
            said = missing
            on_wait(f"waiting for rank {missing} to become ready on another host")
        if time.monotonic() > said_at + REMIND_S:
            said_at = time.monotonic()
            logger.warning("waiting for rank %s to become ready on another host", missing)
        receive(_POLL_S)
