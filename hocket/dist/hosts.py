"""The server's side of many hosts: waits until every rank has a host, and notices when one goes. Torch-free.

Knows nothing of what the ranks do: they speak to the front themselves.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import zmq

from hocket.channel.lobby import Alive, End, FromHost, HostMessage, Join, Lobby, RankEnded, Refused, Start, Waiting
from hocket.config.hosts import HostConfig
from hocket.dist.processes import REMIND_S, listed
from hocket.envs import CLUSTER_SECRET
from hocket.errors import ConfigError, RankLost

logger = logging.getLogger(__name__)
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
    """The hosts of a server, this one's ranks excepted.

    Raises:
        ConfigError: the address is not of this host, or the port is taken.
    """

    def __init__(self, config: HostConfig, must_agree: dict[str, Any]) -> None:
        self.config = config
        self.address = resolved(config.address)
        if not CLUSTER_SECRET.get() and not ipaddress.ip_address(self.address).is_loopback:
            place = f"{config.address}:{config.port}"
            logger.warning("anybody who reaches %s can join: set HOCKET_CLUSTER_SECRET alike on all hosts", place)
        self._roster = Roster(config.world_size, config.ranks, must_agree)
        self._has_started = False
        try:
            self._lobby = Lobby(self.address, config.port)
        except zmq.ZMQError as error:
            field, value = "data_parallel_rpc_port", str(config.port)
            if error.errno != zmq.EADDRINUSE:
                field, value = "data_parallel_address", config.address
            allowed = "an address of this host and a free port on it"
            raise ConfigError(field, value, allowed, where=f"here: {error.strerror}") from None
        # The group's store listens here already, so that no one takes its port; rank 0 inherits the socket.
        self.store_listener = socket.create_server((self.address, 0), backlog=4 * config.world_size)

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
        host, port = self.store_listener.getsockname()[:2]
        self._tell_all(Start(channel=channel, store_host=host, store_port=port))

    def check(self) -> None:
        """Look whether a host or one of its ranks has gone.

        Raises:
            RankLost: one has; names it.
        """
        self._handle(self._lobby.receive(0.0), [])
        if (guest := self._roster.silent(time.monotonic())) is not None:
            host = guest.join.host
            raise RankLost(f"host {host} (rank {listed(guest.ranks)}) has not been heard of for {_SILENCE_S:g} s")

    def _handle(self, messages: list[tuple[bytes, HostMessage]], missing: list[int]) -> None:
        now = time.monotonic()
        # A host that starts anew says so under its old name and joins under another, and which is heard first is chance.
        for name, message in sorted(messages, key=lambda pair: isinstance(pair[1], Join)):
            self._roster.heard(name, now)
            if isinstance(message, Join):
                self._answer(name, message, missing, now)
            elif isinstance(message, RankEnded) and name in self._roster.guests:
                host = self._roster.guests[name].join.host
                raise RankLost(f"rank {message.rank} ended unexpectedly on host {host} ({message.how})")

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

    def _tell_all(self, message: Start | End) -> None:
        for name in self._roster.guests:
            self._lobby.send(name, message)

    def close(self, error: str) -> None:
        """Tell all hosts that it is over; error: why, "" where it ended as it should."""
        self._tell_all(End(error=error))
        self._lobby.close()
        self.store_listener.close()


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


def resolved(address: str) -> str:
    """The IPv4 address of a name. Raises ConfigError where there is none."""
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("data_parallel_address", address, f"an IPv4 address or a name of one ({error.strerror})") from None
    return str(found[0][4][0])


def _of(waited_s: float, limit_s: float) -> str:
    return f"{waited_s:.0f} of {limit_s:g} s"


