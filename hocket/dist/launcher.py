"""Starts the rank processes, watches them, and speaks to them. Knows nothing of prompts or models; torch-free.

On one host the ranks are spawned here. Of many hosts this one's are, and `hosts.py` knows the others. Under `torchrun`
this runs in rank 0's process, which starts rank 0's worker; the other ranks are torchrun's and find the front through the
group's store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hocket.channel.front import FrontChannel
from hocket.channel.lobby import Leaving
from hocket.channel.messages import (
    Configure,
    Failed,
    Hello,
    NeedWake,
    Progress,
    RankMessage,
    Ready,
    Shutdown,
    ToRank,
    Wake,
)
from hocket.config.engine import EngineConfig
from hocket.dist.causes import Causes, where
from hocket.dist.hosts import FromElsewhere, Hosts
from hocket.dist.processes import REMIND_S, end_all, listed, private_folder, spawn_rank
from hocket.dist.record import Records
from hocket.dist.servers import Others
from hocket.errors import HocketError, RankLost

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
OnWait = Callable[[str], None]
"""Told "waiting for rank 1 to start", and again whenever one of those has come."""
_POLL_S = 0.1
_CHECK_S = 0.2
_CLOSE_S = 5.0


def under_torchrun() -> bool:
    """Whether `torchrun` (or another launcher with its environment) started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


class RankGroup:
    """`world_size` rank processes and the channel to them.

    Every failure of a rank raises, from whatever call notices it, the first cause's error, after all processes ended.
    """

    def __init__(
        self,
        world_size: int,
        startup_timeout_s: float,
        hosts: Others | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        self.world_size = world_size
        self.is_part = hosts is not None and hosts.config.own_server
        self.ranks = hosts.config.ranks if hosts is not None and self.is_part else range(world_size)
        self._hosts = hosts
        self._startup_timeout_s = startup_timeout_s
        self._on_wait = on_wait
        self._folder = private_folder()
        self._channel = FrontChannel(_bind_address(self._folder, hosts))
        self._records = Records(self._folder, world_size, create=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._causes = Causes(world_size, self._channel, self._processes, self._records, hosts)
        self._waves_announced = 0
        self.on_leaving: Callable[[str], None] | None = None
        """Told who, where another host's server was told to end: this one should too."""
        self._leaving = ""
        self.last_heard = dict.fromkeys(self.ranks, 0.0)
        self.pids: dict[int, int] = {}
        self.closed = False
        self._checked_at = 0.0

    @classmethod
    def start(
        cls,
        world_size: int,
        startup_timeout_s: float,
        hosts: Others | None = None,
        on_wait: OnWait | None = None,
    ) -> RankGroup:
        """Start all ranks and wait until each has joined. hosts: the other hosts, which is closed with the group.

        Raises:
            RankLost: a rank or its host did not come within the limit, or died; names it.
        """
        group = cls(world_size, startup_timeout_s, hosts, on_wait)
        try:
            if hosts is not None:
                hosts.gather(startup_timeout_s, on_wait)
                hosts.start(group._channel.address)
            group._spawn_all()
            group._wait_for(Hello, startup_timeout_s, "start")
        except HocketError as error:
            group.kill(str(error), type(error).__name__)
            raise
        except BaseException as error:
            was_told = isinstance(error, KeyboardInterrupt)
            group.kill("it was told to end" if was_told else f"{type(error).__name__}: {error}")
            raise
        return group

    def _spawn_all(self) -> None:
        size, address, limit_s = self.world_size, self._channel.address, self._startup_timeout_s
        if self._hosts is not None:
            for rank in self._hosts.config.ranks:
                more, fd = self._hosts.rank_place(rank)
                self._processes[rank] = spawn_rank(rank, size, address, limit_s, store_fd=fd, environment=more)
            self._hosts.spawned()
        elif under_torchrun():
            self._processes[0] = spawn_rank(0, size, address, limit_s)
        else:
            for rank in self.ranks:
                self._processes[rank] = spawn_rank(rank, size, address, limit_s, store=f"{self._folder}/store")

    def configure(self, config: EngineConfig, on_progress: OnProgress | None = None) -> list[dict[str, Any]]:
        """Build the engine on every rank; returns each rank's start-up facts, by rank."""
        self._causes.device, self._causes.step_timeout_s = config.device, config.step_timeout_s
        self.broadcast(Configure(config=config))
        ready = self._wait_for(Ready, config.startup_timeout_s, "become ready", on_progress)
        if self._hosts is not None:
            self._wait_for_others(self._hosts)
        return [ready[rank].info for rank in self.ranks]

    def send(self, rank: int, message: ToRank) -> None:
        """Send to one rank. Raises RankLost where it has gone."""
        self._send([rank], message)

    def broadcast(self, message: ToRank) -> None:
        """Send to all ranks. Raises RankLost where one has gone."""
        self._send(self.ranks, message)

    def _send(self, ranks: Iterable[int], message: ToRank) -> None:
        try:
            self._channel.send(ranks, message)
        except RankLost as error:
            self._check_processes()  # knows more about why
            self.kill(str(error))
            raise

    def receive(self, timeout_s: float) -> list[RankMessage]:
        """Messages of the ranks; waits up to `timeout_s` for the first. Wake requests are answered here.

        Raises:
            HocketError: a rank failed or its process ended; the group is gone then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            wait = max(min(_POLL_S, deadline - time.monotonic()), 0.0)
            kept = self._sort(self._heard(wait))
            now = time.monotonic()
            if now > self._checked_at + _CHECK_S:  # also while other ranks go on talking
                self._checked_at = now
                self._check_processes()
                kept += self._sort(self._check_hosts())
            if kept or now >= deadline:
                return kept

    def filenos(self) -> list[int]:
        """What an event loop may watch, as FrontChannel.fileno says."""
        return [self._channel.fileno(), *([self._hosts.fileno()] if self._hosts is not None and self.is_part else [])]

    def has_messages(self) -> bool:
        """Whether `receive` would find something now."""
        has_from_elsewhere = self._hosts is not None and self.is_part and self._hosts.has_messages()
        return has_from_elsewhere or self._channel.has_messages()

    def _heard(self, wait_s: float) -> Sequence[RankMessage | FromElsewhere]:
        """What has arrived from ranks here and servers elsewhere; waits for the first."""
        if not self.is_part:
            return self._channel.receive(wait_s)
        if wait_s > 0 and not self.has_messages():
            poller = select.poll()
            for fd in self.filenos():
                poller.register(fd, select.POLLIN)
            poller.poll(wait_s * 1000)
        return [*self._channel.receive(0.0), *self._check_hosts()]

    def _sort(self, messages: Iterable[RankMessage | FromElsewhere]) -> list[RankMessage]:
        """Handle what concerns the group itself; return the rest."""
        kept: list[RankMessage] = []
        now = time.monotonic()
        for message in messages:
            if isinstance(message, Wake | Leaving):
                self._obey(message)
                continue
            self.last_heard[message.rank] = now
            if isinstance(message, NeedWake):
                self._wake(message)
            elif isinstance(message, Failed):
                self._fail(message)
            else:
                kept.append(message)
        return kept

    def _wake(self, message: NeedWake) -> None:
        """Have all ranks step, once for each wave."""
        if message.wave > self._waves_announced:
            self._waves_announced = message.wave
            if self._hosts is None or self._hosts.need_wake(message):
                self.broadcast(Wake(wave=message.wave))

    # -- servers on every host ----------------------------------------------------------------------------------

    def _wait_for_others(self, hosts: Others) -> None:
        """Until the ranks behind other servers are ready too: a step with these would wait for them. Each server has a
        limit for its own."""
        hosts.ready()
        said, said_at = "", time.monotonic()
        while missing := listed(hosts.unready):
            if self._on_wait is not None and missing != said:
                said = missing
                self._on_wait(f"waiting for rank {missing} to become ready on another host")
            if time.monotonic() > said_at + REMIND_S:
                said_at = time.monotonic()
                logger.warning("waiting for rank %s to become ready on another host", missing)
            self.receive(_POLL_S)

    def _obey(self, message: Wake | Leaving) -> None:
        """What another host's server says to this one."""
        if isinstance(message, Wake):
            self.broadcast(message)
            return
        self._leaving = message.who
        if self.on_leaving is not None:
            self.on_leaving(message.who)

    def watch_leaving(self, on_leaving: Callable[[str], None]) -> None:
        """Have it told, also of what was said before, that another host's server ends and this one should."""
        self.on_leaving = on_leaving
        if self._leaving:
            on_leaving(self._leaving)

    def leave(self) -> None:
        """Tell the servers of other hosts that this one was told to end."""
        if self._hosts is not None and not self.closed:
            self._hosts.leave()

    def drained(self) -> None:
        """Tell them that this one answers nobody any more."""
        if self._hosts is not None and not self.closed:
            self._hosts.drained()

    @property
    def needed_by(self) -> list[int]:
        """Ranks whose servers still answer, so that they need the ranks here."""
        return [] if self._hosts is None or self.closed else self._hosts.undrained

    def _wait_for(
        self, kind: type[Hello] | type[Ready], timeout_s: float, verb: str, on_progress: OnProgress | None = None
    ) -> dict[int, Any]:
        deadline = time.monotonic() + timeout_s
        said_at = time.monotonic()
        seen: dict[int, Any] = {}
        said = ""
        while len(seen) < len(self.ranks):
            now, missing = time.monotonic(), listed(set(self.ranks) - seen.keys())
            if self._on_wait is not None and missing != said:
                self._on_wait(f"waiting for rank {missing} to {verb}")
                said = missing
            if now > deadline:
                error = RankLost(f"rank {missing} did not {verb} within {timeout_s:g} s (--startup-timeout)")
                self.kill(str(error))
                raise error
            if now > said_at + REMIND_S and self._has_ranks_elsewhere():
                said_at = now
                logger.warning("waiting for rank %s to %s, for up to %.0f s more", missing, verb, deadline - now)
            for message in self.receive(_POLL_S):
                if isinstance(message, kind):
                    seen[message.rank] = message
                    if isinstance(message, Hello):
                        self.pids[message.rank] = message.pid
                elif isinstance(message, Progress):
                    deadline = time.monotonic() + timeout_s  # loading a large model may take longer, while it moves
                    if on_progress is not None and message.rank == self.ranks[0]:
                        on_progress(message.phase, message.done, message.total)
        return seen

    def _has_ranks_elsewhere(self) -> bool:
        """Whether some were not started here, so that somebody may have to do something about them."""
        return len(self._processes) < len(self.ranks)

    def _check_hosts(self) -> list[FromElsewhere]:
        try:
            return self._hosts.check() if self._hosts is not None else []
        except HocketError as error:
            self._hear_last_words()
            self.kill(str(error), type(error).__name__)
            raise

    def _hear_last_words(self) -> None:
        for message in self._channel.receive(_POLL_S):
            if isinstance(message, Failed):
                self._fail(message)

    def _check_processes(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is None:
                continue
            self._hear_last_words()  # which may still be on the way
            error = self._causes.of_death(rank, code)
            self.kill(str(error), type(error).__name__)
            raise error

    def _fail(self, first: Failed) -> None:
        """Raise the first cause, after all processes ended."""
        error = self._causes.of(first)
        self.kill(str(error), type(error).__name__)
        raise error

    def close(self) -> None:
        """Ask every rank to end, wait, and kill what is left."""
        if self.closed:
            return
        if self.needed_by:  # ranks that are told to end would step with the others', who are not
            self.kill("")
            return
        try:
            if self._hosts is not None:
                self._hosts.end()
            with contextlib.suppress(HocketError):
                self._channel.send(self.ranks, Shutdown())
            deadline = time.monotonic() + _CLOSE_S
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.01))
            if left := [rank for rank, process in self._processes.items() if process.poll() is None]:
                said = "rank %s did not end within %g s of being told to: killed%s"
                logger.warning(said, listed(left), _CLOSE_S, where(self._records.read()))
        finally:  # also when Ctrl-C comes a second time
            self.kill("")

    def kill(self, why: str = "a rank was lost", kind: str = RankLost.__name__) -> None:
        """End every process at once and remove the sockets. `why` and its class are for the other hosts."""
        if self.closed:
            return
        self.closed = True
        try:
            if self._hosts is not None:
                self._hosts.close(why, kind)
            end_all(self._processes.values())
            self._channel.close()
            self._records.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)





def _bind_address(folder: str, hosts: Others | None) -> str:
    """Where all ranks that speak to this front are on its host a socket file; else TCP on the address the others know."""
    if isinstance(hosts, Hosts) and not hosts.config.own_server:
        return f"tcp://{hosts.address}:*"
    if under_torchrun() and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return f"tcp://{socket.gethostbyname(os.environ['MASTER_ADDR'])}:*"
    return f"ipc://{folder}/front"
