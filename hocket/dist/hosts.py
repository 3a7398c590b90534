"""The server's side of many hosts: waits until every rank has a host, and notices when one goes. Torch-free.

Knows nothing of what the ranks do: they speak to the front themselves.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable
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
from hocket.dist.roster import SILENCE_S, Roster
from hocket.envs import CLUSTER_SECRET
from hocket.errors import ConfigError, HocketError, RankLost

logger = logging.getLogger(__name__)
FromElsewhere = NeedWake | Wake | Failed | Leaving
"""What other hosts say that concerns this one's ranks or server."""
_POLL_S = 0.2


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
                raise RankLost(f"host {host} (rank {listed(guest.ranks)}) has not been heard of for {SILENCE_S:g} s")
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
