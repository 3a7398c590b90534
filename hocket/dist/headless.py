"""A headless host: starts its ranks for a server elsewhere, watches them, ends with it. Knows no engine; torch-free."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from hocket.channel.lobby import Alive, LobbyGuest, RankEnded, Start
from hocket.config.hosts import HostConfig
from hocket.dist.guest import ALIVE_S, Guest
from hocket.dist.hosts import group_environment
from hocket.dist.processes import end_all, how_ended, listed, spawn_rank
from hocket.errors import HocketError, RankLost

_POLL_S = 0.2
_END_S = 10.0
"""For ranks that were told to end."""


def run_ranks(config: HostConfig, must_agree: dict[str, Any], startup_timeout_s: float) -> None:
    """Join the server, run this host's ranks, return when the server has ended as it should.

    SIGTERM and Ctrl-C wait for the server, which may still need the ranks to finish requests; a second one does not.

    Raises:
        RankLost: the server or a rank was lost. ConfigError: the server refuses this host. HocketError: no server within
            the limit, or it or a rank was lost after a signal: nothing to start anew for.
        KeyboardInterrupt: a signal said to end.
    """
    guest = _Headless(config, must_agree, startup_timeout_s)
    try:
        start = guest.join()
        with _signals_wait() as seen:
            try:
                guest.run(start)
            except RankLost as error:
                if seen:
                    raise HocketError(str(error)) from error
                raise
    finally:
        guest.close()


class _Headless:
    """One life of the host's ranks, with one server."""

    def __init__(self, config: HostConfig, must_agree: dict[str, Any], startup_timeout_s: float) -> None:
        self._config = config
        self._startup_timeout_s = startup_timeout_s
        self._guest = Guest(config, must_agree, startup_timeout_s)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def join(self) -> Start:
        """Say that this host is there until all are."""
        return self._guest.join()

    def run(self, start: Start) -> None:
        """Start the ranks; return when they have ended as the server told them."""
        lobby = self._guest.lobby
        for rank in self._config.ranks:
            more = group_environment(self._config, rank, start.store_host, start.store_port)
            world = self._config.world_size
            self._processes[rank] = spawn_rank(rank, world, start.channel, self._startup_timeout_s, environment=more)
        say(f"rank {listed(self._config.ranks)} started for the server at {self._config.address}")
        spoke_at = 0.0
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > spoke_at + ALIVE_S:
                spoke_at = time.monotonic()
                lobby.send(Alive())
            for message in lobby.receive(_POLL_S):
                if self._guest.obey(message):
                    self._wait_for_end()
                    return
            self._check_ranks(lobby)

    def _check_ranks(self, lobby: LobbyGuest) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code:
                # A rank that reports its own failure ends with 1 or 3 and is heard first: the server knows more then.
                how = how_ended(code)
                lobby.send(RankEnded(rank=rank, how=how))
                raise RankLost(f"rank {rank} ended unexpectedly ({how}); the server's host says why")

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + _END_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))

    def close(self) -> None:
        """End what is left."""
        end_all(self._processes.values())
        self._guest.close()


@contextlib.contextmanager
def _signals_wait() -> Iterator[list[int]]:
    """The first signal says that the server decides, the second ends. Gives the list of those seen so far."""
    seen: list[int] = []

    def handle(number: int, _: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        say(f"{name}: ranks here end with the server; once more: at once")

    former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def say(line: str) -> None:
    """A line to whoever runs this host."""
    print(f"hocket: {line}", file=sys.stderr, flush=True)
