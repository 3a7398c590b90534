"""A host's way to the server that the others meet at: finds it, however late it comes, and waits until all are there.

Knows nothing of ranks' processes; torch-free.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from hocket.channel.lobby import End, Join, LobbyGuest, Refused, ServerMessage, Start, Waiting
from hocket.config.hosts import HostConfig
from hocket.dist.names import resolved
from hocket.dist.processes import REMIND_S, listed
from hocket.dist.roster import SILENCE_S
from hocket.errors import ConfigError, HocketError, RankLost, revive

logger = logging.getLogger(__name__)
ALIVE_S = 1.0
"""Between two words by which a host says that it lives."""


class Guest:
    """One host among those that join. `name`: what the others call it."""

    def __init__(self, config: HostConfig, must_agree: dict[str, Any], startup_timeout_s: float) -> None:
        self._config = config
        self._limit_s = startup_timeout_s
        self.name = host_name()
        first, count = config.start_rank, config.num_ranks
        self._joining = Join(
            host=self.name, start_rank=first, num_ranks=count, world_size=config.world_size, must_agree=must_agree
        )
        self._lobby: LobbyGuest | None = None
        self._address = ""
        self._unheard = ""  # why nobody may hear this host
        self._speaks_at = self._heard_at = 0.0

    @property
    def place(self) -> str:
        """Where the server is."""
        return f"{self._config.address}:{self._config.port}"

    @property
    def is_in(self) -> bool:
        """Whether there is anybody to speak to."""
        return self._lobby is not None

    @property
    def lobby(self) -> LobbyGuest:
        assert self._lobby is not None, "join first"
        return self._lobby

    def join(self, on_wait: Callable[[str], None] | None = None) -> Start:
        """Say that this host is there until all are. Tells `on_wait` who is waited for.

        Raises:
            ConfigError: the server refuses this host. HocketError: no server within the limit. RankLost: it gave up.
        """
        began = said_at = time.monotonic()
        deadline, waits_for = began + self._limit_s, "the server"
        self._seek()
        while True:
            for message in self._heard():
                if isinstance(message, Start):
                    self._heard_at = time.monotonic()
                    return message
                if isinstance(message, Waiting):
                    waits_for = f"a host with rank {listed(message.missing)}" if message.missing else "the server"
                    deadline = time.monotonic() + self._limit_s  # the server has a limit for the others
                self.obey(message)
            if on_wait is not None:
                on_wait(f"waiting for {waits_for}")
            now = time.monotonic()
            if now > deadline:
                limit = f"within {self._limit_s:g} s (--startup-timeout)"
                raise HocketError(f"no server let this host in at {self.place} {limit}{self._why()}")
            if now > said_at + REMIND_S:
                said_at = now
                logger.warning("waiting for %s at %s: %.0f s%s", waits_for, self.place, now - began, self._why())
                self._seek()

    def receive(self, timeout_s: float) -> list[ServerMessage]:
        """What the server has said since it let this host start; waits up to `timeout_s` for the first.

        Raises:
            RankLost: it has gone, or its process says nothing any more, though its connection may stand.
        """
        try:
            found = self.lobby.receive(timeout_s)
        except RankLost:
            raise RankLost(f"the server with rank 0, at {self.place}, went away") from None
        now = time.monotonic()
        if found:
            self._heard_at = now
        elif now > self._heard_at + SILENCE_S:
            raise RankLost(f"the server with rank 0, at {self.place}, has not been heard of for {SILENCE_S:g} s")
        return found

    def obey(self, message: ServerMessage) -> bool:
        """Whether the server has ended as it should; raises where it or this host cannot go on."""
        if isinstance(message, Refused):
            ranks = f"{listed(self._config.ranks)} of {self._config.world_size}"
            allowed = "ranks that no other host has, with the server's options"
            raise ConfigError("data_parallel_start_rank", ranks, allowed, where=f"by the server: {message.message}")
        if isinstance(message, End) and message.error:
            raise revive(message.kind, f"the server ended: {message.error}")
        return isinstance(message, End)

    def _seek(self) -> None:
        """Look up where the server is: its name may have an address late, and after a restart another one."""
        try:
            address = resolved(self._config.address)
        except ConfigError as error:
            self._unheard = f" ({error.allowed})"
            return
        self._unheard = ""
        if address != self._address:
            self.close()
            self._address, self._speaks_at = address, 0.0
            self._lobby = LobbyGuest(address, self._config.port)

    def _heard(self) -> list[ServerMessage]:
        """What the server says, within ALIVE_S; so often it is told that this host is there, be it ever so fast."""
        if self._lobby is None:
            time.sleep(ALIVE_S)
            self._seek()
            return []
        now = time.monotonic()
        if now >= self._speaks_at:
            self._speaks_at = now + ALIVE_S
            self._lobby.send(self._joining)
        try:
            return self._lobby.receive(self._speaks_at - now)
        except RankLost:  # it ended before all hosts were there; the socket connects to the next one by itself
            return []

    def _why(self) -> str:
        if self._lobby is not None and self._lobby.wrong_key:
            return " (what answers there has another HOCKET_CLUSTER_SECRET, or is no hocket)"
        return self._unheard

    def close(self) -> None:
        """Hang up."""
        if self._lobby is not None:
            self._lobby.close()
            self._lobby = None


def host_name() -> str:
    """What this command is called among those of all hosts."""
    return f"{socket.gethostname()} (process {os.getpid()})"
