"""A server on every host: what they tell each other so that all their ranks step, fail and end together. Torch-free.

Each server speaks to its own ranks only. The first one, which has rank 0, is where the others meet, and decides: when
all ranks wake, which of several failures was the cause, and when nobody needs the ranks any more. Knows no requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hocket.channel.lobby import (
    Alive,
    AllReady,
    Drained,
    End,
    HostMessage,
    Leaving,
    Left,
    RanksReady,
    Start,
    Waiting,
)
from hocket.channel.messages import Failed, NeedWake, Wake
from hocket.config.hosts import HostConfig
from hocket.dist.guest import ALIVE_S, Guest, host_name
from hocket.dist.hosts import FromElsewhere, Hosts, group_environment
from hocket.dist.processes import listed
from hocket.errors import HocketError, RankLost, revive


class Lead(Hosts):
    """The first server's view of the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_ready = False
        self._ready: set[bytes] = set()
        self._drained: set[bytes] = set()

    def _hear(self, name: bytes, message: HostMessage) -> list[FromElsewhere]:
        if isinstance(message, Left) and self._has_started:
            raise revive(message.kind, f"{message.error} (on host {self._roster.guests[name].join.host})")
        if isinstance(message, NeedWake | Failed):
            return [message]
        if isinstance(message, RanksReady):
            self._ready.add(name)
            self._tell_ready()
        elif isinstance(message, Drained):
            self._drained.add(name)
        elif isinstance(message, Leaving):
            self._tell_all(message, besides=name)
            return [message]
        return super()._hear(name, message)

    def _without(self, names: set[bytes]) -> list[int]:
        """Ranks of the hosts that are not among `names`."""
        return sorted(rank for name, one in self._roster.guests.items() if name not in names for rank in one.ranks)

    def ready(self) -> None:
        self._is_ready = True
        self._tell_ready()

    def _tell_ready(self) -> None:
        missing = [*([] if self._is_ready else self.config.ranks), *self.unready]
        self._tell_all(Waiting(missing=missing) if missing else AllReady())

    @property
    def unready(self) -> list[int]:
        return self._without(self._ready)

    def need_wake(self, message: NeedWake) -> bool:
        self._tell_all(Wake(wave=message.wave))
        return True

    def leave(self) -> None:
        self._tell_all(Leaving(who=_server_of(self.config)))

    @property
    def undrained(self) -> list[int]:
        return self._without(self._drained) if self._has_started else []

    def drained(self) -> None:
        """Nothing to tell: `undrained` says whether the others are, and `end` that all are."""

    def end(self) -> None:
        self._tell_all(End(error=""))

    def close(self, error: str, kind: str = RankLost.__name__) -> None:
        if not error and self.undrained:
            error = _stopped(self.config)
        super().close(error, kind)


class Member:
    """Any other server's view of the first one; stands where Hosts does."""

    def __init__(
        self,
        config: HostConfig,
        must_agree: dict[str, Any],
        limit_s: float,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self._guest = Guest(config, must_agree, limit_s)
        self._start: Start | None = None
        self._lost: HocketError | None = None
        self._missing = self._elsewhere = sorted(set(range(config.world_size)) - set(config.ranks))
        self._is_over = False
        self._spoke_at = 0.0

    def gather(self, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Wait until every rank has a host, as `Guest.join`."""
        self._start = self._guest.join(on_wait)

    def start(self, channel: str) -> None:
        """This host's ranks speak to this host's front alone."""

    def rank_place(self, rank: int) -> tuple[dict[str, str], int | None]:
        """As Hosts.rank_place."""
        assert self._start is not None
        return group_environment(self.config, rank, self._start.store_host, self._start.store_port), None

    def spawned(self) -> None:
        """This host's ranks have been started."""

    def check(self) -> list[FromElsewhere]:
        """As Hosts.check. Also says that this host lives."""
        if self._lost is not None:
            raise self._lost
        now = time.monotonic()
        if now > self._spoke_at + ALIVE_S:
            self._spoke_at = now
            self._guest.lobby.send(Alive())
        try:
            return self._take(0.0)
        except HocketError as error:
            self._lost = error
            raise

    def _take(self, wait_s: float) -> list[FromElsewhere]:
        said: list[FromElsewhere] = []
        try:
            messages = self._guest.lobby.receive(wait_s)
        except RankLost:
            if self._is_over:
                return said
            raise RankLost(f"the server with rank 0, at {self._guest.place}, went away") from None
        for message in messages:
            if isinstance(message, Wake | Leaving):
                said.append(message)
            elif isinstance(message, Waiting):
                self._missing = sorted(set(message.missing) - set(self.config.ranks))
            elif isinstance(message, AllReady):
                self._missing = []
            elif isinstance(message, End) and message.error:
                raise revive(message.kind, message.error)
            elif isinstance(message, End):
                self._is_over = True
        return said

    def fileno(self) -> int:
        """As FrontChannel.fileno."""
        return self._guest.lobby.fileno()

    def has_messages(self) -> bool:
        """Whether `check` would find something said now."""
        return self._guest.lobby.has_messages()

    def ready(self) -> None:
        """This host's ranks are."""
        self._guest.lobby.send(RanksReady())

    @property
    def unready(self) -> list[int]:
        """As Hosts.unready."""
        return self._missing

    def need_wake(self, message: NeedWake) -> bool:
        """As Hosts.need_wake: the first server says when, to all."""
        self._guest.lobby.send(message)
        return False

    def report(self, failure: Failed) -> None:
        """A rank of this host failed: the first server finds the cause, which `check` raises."""
        self._guest.lobby.send(failure)

    def leave(self) -> None:
        """As Hosts.leave."""
        self._guest.lobby.send(Leaving(who=_server_of(self.config)))

    def drained(self) -> None:
        """As Hosts.drained."""
        self._guest.lobby.send(Drained())

    @property
    def undrained(self) -> list[int]:
        """As Hosts.undrained."""
        return [] if self._is_over or self._start is None else self._elsewhere

    def end(self) -> None:
        """The first server has said so to all."""

    def close(self, error: str, kind: str = RankLost.__name__) -> None:
        """Hang up; the first server is told why, if it does not know."""
        if self._guest.is_in and not self._is_over and self._lost is None:
            self._guest.lobby.send(Left(kind=kind, error=error or _stopped(self.config)))
        self._guest.close()


Others = Hosts | Member


def others_of(
    config: HostConfig, must_agree: dict[str, Any], limit_s: float, on_wait: Callable[[str], None] | None
) -> Others:
    """The other hosts of the server here. Raises ConfigError as Hosts does."""
    if not config.own_server:
        return Hosts(config, must_agree, limit_s, on_wait)
    return (Lead if config.is_first else Member)(config, must_agree, limit_s, on_wait)


def _server_of(config: HostConfig) -> str:
    return f"the server with rank {listed(config.ranks)}, {host_name()},"


def _stopped(config: HostConfig) -> str:
    return f"{_server_of(config)} was stopped while others ran"
