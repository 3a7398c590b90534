"""Which host has which ranks, from what the hosts say of themselves. Knows neither sockets nor clocks; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hocket.channel.lobby import Join
from hocket.dist.processes import listed

_GONE_BEFORE_START_S = 4.0
"""A host that is silent for so long before the start has gone: another may take its ranks."""
SILENCE_S = 15.0


@dataclass(slots=True)
class _Guest:
    join: Join
    heard_at: float

    @property
    def ranks(self) -> range:
        return range(self.join.start_rank, self.join.start_rank + self.join.num_ranks)


class Roster:
    """Which host has which ranks, from what they say; times in seconds, by the caller's clock.

    own: ranks of the server's host. must_agree: what every host must have been given alike.
    """

    def __init__(self, world_size: int, own: range, must_agree: dict[str, Any]) -> None:
        self._world_size = world_size
        self._own = own
        self._must_agree = must_agree
        self.guests: dict[bytes, _Guest] = {}

    def join(self, name: bytes, message: Join, now: float) -> str | None:
        """Take the host in, or say why not."""
        why = self._contradiction(message) or self.taken(message, now, besides=name)
        if why is None:
            self.guests[name] = _Guest(message, now)
        return why

    def heard(self, name: bytes, now: float) -> None:
        """It lives."""
        if name in self.guests:
            self.guests[name].heard_at = now

    def missing(self, now: float) -> list[int]:
        """Ranks that no host has; hosts that have gone are forgotten."""
        self.guests = {n: g for n, g in self.guests.items() if now - g.heard_at <= _GONE_BEFORE_START_S}
        have = set(self._own).union(*(guest.ranks for guest in self.guests.values()))
        return sorted(set(range(self._world_size)) - have)

    def silent(self, now: float) -> _Guest | None:
        """A host that has not been heard of for too long."""
        return next((guest for guest in self.guests.values() if now - guest.heard_at > SILENCE_S), None)

    def _contradiction(self, message: Join) -> str | None:
        if message.world_size != self._world_size:
            sizes = f"{message.world_size} on the host that joins and {self._world_size} at the server"
            return f"--data-parallel-size is {sizes}"
        ranks = _Guest(message, 0.0).ranks
        if not ranks or ranks[0] < 0 or ranks[-1] >= self._world_size:
            last = message.start_rank + message.num_ranks - 1
            return f"its ranks, {message.start_rank} to {last}, are none of {self._world_size}"
        keys = sorted(self._must_agree.keys() | message.must_agree.keys())
        for key in keys:
            there, here = message.must_agree.get(key), self._must_agree.get(key)
            if there != here:
                shown = ["not given" if value is None else repr(value) for value in (there, here)]
                return f"{key} is {shown[0]} on the host that joins and {shown[1]} at the server"
        return None

    def taken(self, message: Join, now: float, besides: bytes = b"") -> str | None:
        """Which of its ranks another host than `besides` has, if any."""
        wanted = _Guest(message, now).ranks
        if twice := set(wanted) & set(self._own):
            return f"rank {listed(twice)} is there twice: on the server's host and on {message.host}"
        for other, guest in self.guests.items():
            twice = set(wanted) & set(guest.ranks)
            if other != besides and twice and now - guest.heard_at <= _GONE_BEFORE_START_S:
                return f"rank {listed(twice)} is there twice: on {guest.join.host} and on {message.host}"
        return None
