"""The server's side of many hosts: waits until every rank has a host, and notices when one goes. Torch-free.

Knows nothing of what the ranks do: they speak to the front themselves.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from hocket.channel.lobby import (
    End,
    HostMessage,
    Join,
    Leaving,
    Left,
    Lobby,
    RankEnded,
    Refused,
    ServerMessage,
    Start,
    Waiting,
)
from hocket.channel.messages import Failed, NeedWake, Wake
from hocket.config.hosts import HostConfig
from hocket.dist.names import is_name, resolved
from hocket.dist.processes import REMIND_S, listed
from hocket.envs import CLUSTER_SECRET
from hocket.errors import ConfigError, HocketError, RankLost

logger = logging.getLogger(__name__)
FromElsewhere = NeedWake | Wake | Failed | Leaving
"""What other hosts say that concerns this one's ranks or server."""
_POLL_S = 0.2
_GONE_BEFORE_START_S = 4.0
"""A host that is silent for so long before the start has gone: another may take its ranks."""
_SILENCE_S = 15.0


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
        return next((guest for guest in self.guests.values() if now - guest.heard_at > _SILENCE_S), None)

    def _contradiction(self, message: Join) -> str | None:
        if message.world_size != self._world_size:
            return f"--data-parallel-size is {message.world_size} there and {self._world_size} at the server"
        ranks = _Guest(message, 0.0).ranks
        if not ranks or ranks[0] < 0 or ranks[-1] >= self._world_size:
            last = message.start_rank + message.num_ranks - 1
            return f"its ranks, {message.start_rank} to {last}, are none of {self._world_size}"
        keys = sorted(self._must_agree.keys() | message.must_agree.keys())
        for key in keys:
            there, here = message.must_agree.get(key), self._must_agree.get(key)
            if there != here:
                return f"{key} is {there!r} there and {here!r} at the server"
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


class Hosts:
    """The hosts of a server, this one's ranks excepted: headless, so that all of their ranks speak to this front.

    limit_s: how long to wait for a name that has no address of this host yet, as happens where a cluster's hosts have
    just been made; `on_wait` is told. Raises ConfigError: the address is not of this host, or the port is taken.
    """

    def __init__(
        self,
        config: HostConfig,
        must_agree: dict[str, Any],
        limit_s: float = 0.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self._roster = Roster(config.world_size, config.ranks, must_agree)
        self._has_started = False
        self._lost: HocketError | None = None
        self.address, self._lobby = self._opened(limit_s, on_wait)
        if not CLUSTER_SECRET.get() and not ipaddress.ip_address(self.address).is_loopback:
            place = f"{config.address}:{config.port}"
            logger.warning("anybody who reaches %s can join: set HOCKET_CLUSTER_SECRET alike on all hosts", place)
        # The group's store listens here already, so that no one takes its port; rank 0 inherits the socket.
        self._store = socket.create_server((self.address, 0), backlog=4 * config.world_size)

    def _opened(self, limit_s: float, on_wait: Callable[[str], None] | None) -> tuple[str, Lobby]:
        began = said_at = time.monotonic()
        while True:
            try:
                address = resolved(self.config.address)
                return address, self._lobby_at(address)
            except ConfigError as error:
                now = time.monotonic()
                may_change = error.field == "data_parallel_address" and is_name(self.config.address)
                if not may_change or now > began + limit_s:
                    raise
                if on_wait is not None:
                    on_wait(f"waiting for {self.config.address} to be a name of this host")
                if now > said_at + REMIND_S:
                    said_at = now
                    logger.warning("waiting for an address of this host: %s: %s", _of(now - began, limit_s), error)
                time.sleep(_POLL_S)

    def _lobby_at(self, address: str) -> Lobby:
        config = self.config
        try:
            return Lobby(address, config.port)
        except zmq.ZMQError as error:
            field, value = "data_parallel_rpc_port", str(config.port)
            if error.errno != zmq.EADDRINUSE:
                field, value = "data_parallel_address", config.address
            allowed = "an address of this host and a free port on it"
            raise ConfigError(field, value, allowed, where=f"here: {error.strerror}") from None

    def gather(self, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Wait until every rank has a host; say every few seconds which have none, and tell `on_wait` at once.

        Raises:
            RankLost: some have none within the limit; names them.
        """
        began = time.monotonic()
        said_at = began
        while missing := self._roster.missing(time.monotonic()):
            now = time.monotonic()
            if now > began + timeout_s:
                where = f"at {self.config.address}:{self.config.port}"
                raise RankLost(f"no host with rank {listed(missing)} came {where} within {timeout_s:g} s (--startup-timeout)")
            if now > said_at + REMIND_S:
                said_at = now
                logger.warning("waiting for a host with rank %s: %s", listed(missing), _of(now - began, timeout_s))
            if on_wait is not None:
                on_wait(f"waiting for a host with rank {listed(missing)}")
            self._handle(self._lobby.receive(_POLL_S), missing)

    def start(self, channel: str) -> None:
        """Tell all hosts to start their ranks, which will find the front at `channel`."""
        self._has_started = True
        host, port = self._store.getsockname()[:2]
        self._tell_all(Start(channel=channel, store_host=host, store_port=port))

    def rank_place(self, rank: int) -> tuple[dict[str, str], int | None]:
        """What tells a rank of this host where it stands, and the socket at which it is to serve the group's store."""
        place = group_environment(self.config, rank, *self._store.getsockname()[:2])
        return place, self._store.fileno() if rank == 0 else None

    def spawned(self) -> None:
        """This host's ranks have been started: rank 0 has the store's socket."""
        self._store.close()

    def check(self) -> list[FromElsewhere]:
        """What other hosts' servers have said since.

        Raises:
            HocketError: a host or one of its ranks has gone; names it. From then on at every call.
        """
        if self._lost is not None:
            raise self._lost
        try:
            said = self._handle(self._lobby.receive(0.0), [])
            if (guest := self._roster.silent(time.monotonic())) is not None:
                host = guest.join.host
                raise RankLost(f"host {host} (rank {listed(guest.ranks)}) has not been heard of for {_SILENCE_S:g} s")
        except HocketError as error:
            self._lost = error
            raise
        return said

    def fileno(self) -> int:
        """As FrontChannel.fileno."""
        return self._lobby.fileno()

    def has_messages(self) -> bool:
        """Whether `check` would find something said now."""
        return self._lobby.has_messages()

    def _handle(self, messages: list[tuple[bytes, HostMessage]], missing: list[int]) -> list[FromElsewhere]:
        now = time.monotonic()
        said: list[FromElsewhere] = []
        # A host that starts anew says so under its old name and joins under another, and which is heard first is chance.
        for name, message in sorted(messages, key=lambda pair: isinstance(pair[1], Join)):
            self._roster.heard(name, now)
            if isinstance(message, Join):
                self._answer(name, message, missing, now)
            elif isinstance(message, RankEnded) and name in self._roster.guests:
                host = self._roster.guests[name].join.host
                raise RankLost(f"rank {message.rank} ended unexpectedly on host {host} ({message.how})")
            elif name in self._roster.guests:
                said += self._hear(name, message)
        return said

    def _hear(self, name: bytes, message: HostMessage) -> list[FromElsewhere]:
        """Something else that a host says; returns what is not for this object."""
        if isinstance(message, Left) and not self._has_started:
            del self._roster.guests[name]  # others may have its ranks
        return []

    def _answer(self, name: bytes, message: Join, missing: list[int], now: float) -> None:
        if self._has_started:  # one without ranks that run may wait until all are started anew
            if name not in self._roster.guests and (why := self._roster.taken(message, now)):
                self._lobby.send(name, Refused(message=why))
            return
        is_new = name not in self._roster.guests
        why = self._roster.join(name, message, now)
        if why is not None:
            logger.warning("refused host %s: %s", message.host, why)
            self._lobby.send(name, Refused(message=why))
            return
        if is_new:
            logger.info("host %s has joined", message.host)
        self._lobby.send(name, Waiting(missing=self._roster.missing(now) or missing))

    def _tell_all(self, message: ServerMessage, besides: bytes = b"") -> None:
        for name in self._roster.guests:
            if name != besides:
                self._lobby.send(name, message)

    # What servers of other hosts need; here there are none.

    def ready(self) -> None:
        """This host's ranks are."""

    @property
    def unready(self) -> list[int]:
        """Ranks behind other hosts' servers that are not ready, as far as is known."""
        return []

    def need_wake(self, message: NeedWake) -> bool:
        """A rank has work while all sleep. Whether this host's ranks are to be woken now; the others are told."""
        return True

    def leave(self) -> None:
        """This server was told to end; the others are told."""

    def drained(self) -> None:
        """This server answers nobody any more."""

    @property
    def undrained(self) -> list[int]:
        """Ranks whose servers have not ended, so that they need all ranks, as far as is known."""
        return []

    def end(self) -> None:
        """All servers have ended: the ranks may. Headless hosts need not be told before `close`."""

    def close(self, error: str, kind: str = RankLost.__name__) -> None:
        """Tell all hosts that it is over; error: why, "" where it ended as it should; kind: its class."""
        self._tell_all(End(error=error, kind=kind))
        self._lobby.close()
        self._store.close()


def group_environment(config: HostConfig, rank: int, store_host: str, store_port: int) -> dict[str, str]:
    """As torchrun would tell a rank of this host where it stands."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_RANK": str(rank - config.start_rank),
        "LOCAL_WORLD_SIZE": str(config.num_ranks),
        "GROUP_RANK": str(config.start_rank),
        "MASTER_ADDR": store_host,
        "MASTER_PORT": str(store_port),
    }


def _of(waited_s: float, limit_s: float) -> str:
    return f"{waited_s:.0f} of {limit_s:g} s"
