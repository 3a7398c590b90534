"""Starts the rank processes, watches them, and speaks to them. Knows nothing of prompts or models; torch-free.

On one host the ranks are spawned here. Of many hosts this one's are, and `hosts.py` knows the others. Under `torchrun`
this runs in rank 0's process, which starts rank 0's worker; the other ranks are torchrun's and find the front through the
group's store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

from hocket import errors
from hocket.channel.front import FrontChannel
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
from hocket.dist.hosts import Hosts, group_environment
from hocket.dist.processes import REMIND_S, end_all, how_ended, listed, private_folder, spawn_rank
from hocket.dist.record import Records, Whereabouts, apart, behind, described, elsewhere, lifeless
from hocket.errors import HocketError, RankLost, StepDesync

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
OnWait = Callable[[str], None]
"""Told "waiting for rank 1 to start", and again whenever one of those has come."""
_POLL_S = 0.1
_CHECK_S = 0.2
_GATHER_CAUSES_S = 2.0
_CLOSE_S = 5.0
_SHARE_OF_LIMIT = 0.5
"""Of a step's limit: a process that has not run for so long is what the others waited for, since they waited it all."""
_ABOUT_RANKS = ("RankLost", "StepDesync", "BatonTimeout", "OverlapError")


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
        hosts: Hosts | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        self.world_size = world_size
        self.ranks = range(world_size)
        self._hosts = hosts
        self._startup_timeout_s = startup_timeout_s
        self._on_wait = on_wait
        self._device, self._step_timeout_s = "cpu", math.inf
        self._folder = private_folder()
        self._channel = FrontChannel(f"tcp://{hosts.address}:*" if hosts else _bind_address(self._folder))
        self._records = Records(self._folder, world_size, create=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._waves_announced = 0
        self.last_heard = dict.fromkeys(self.ranks, 0.0)
        self.pids: dict[int, int] = {}
        self.closed = False
        self._checked_at = 0.0

    @classmethod
    def start(
        cls,
        world_size: int,
        startup_timeout_s: float,
        hosts: Hosts | None = None,
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
        except BaseException as error:
            group.kill(str(error) or type(error).__name__)
            raise
        return group

    def _spawn_all(self) -> None:
        size, address, limit_s = self.world_size, self._channel.address, self._startup_timeout_s
        if self._hosts is not None:
            listener = self._hosts.store_listener
            for rank in self._hosts.config.ranks:
                more = group_environment(self._hosts.config, rank, *listener.getsockname()[:2])
                fd = listener.fileno() if rank == 0 else None
                self._processes[rank] = spawn_rank(rank, size, address, limit_s, store_fd=fd, environment=more)
            listener.close()  # rank 0 has it
        elif under_torchrun():
            self._processes[0] = spawn_rank(0, size, address, limit_s)
        else:
            for rank in self.ranks:
                self._processes[rank] = spawn_rank(rank, size, address, limit_s, store=f"{self._folder}/store")

    def configure(self, config: EngineConfig, on_progress: OnProgress | None = None) -> list[dict[str, Any]]:
        """Build the engine on every rank; returns each rank's start-up facts, by rank."""
        self._device, self._step_timeout_s = config.device, config.step_timeout_s
        self.broadcast(Configure(config=config))
        ready = self._wait_for(Ready, config.startup_timeout_s, "become ready", on_progress)
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
        except RankLost:
            self._check_processes()  # knows more about why
            self.kill()
            raise

    def receive(self, timeout_s: float) -> list[RankMessage]:
        """Messages of the ranks; waits up to `timeout_s` for the first. Wake requests are answered here.

        Raises:
            HocketError: a rank failed or its process ended; the group is gone then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            wait = max(min(_POLL_S, deadline - time.monotonic()), 0.0)
            kept = self._sort(self._channel.receive(wait))
            now = time.monotonic()
            if now > self._checked_at + _CHECK_S:  # also while other ranks go on talking
                self._checked_at = now
                self._check_processes()
                self._check_hosts()
            if kept or now >= deadline:
                return kept

    def fileno(self) -> int:
        """What an event loop may watch, as FrontChannel.fileno says."""
        return self._channel.fileno()

    def has_messages(self) -> bool:
        """Whether `receive` would find something now."""
        return self._channel.has_messages()

    def _sort(self, messages: list[RankMessage]) -> list[RankMessage]:
        """Handle what concerns the group itself; return the rest."""
        kept: list[RankMessage] = []
        now = time.monotonic()
        for message in messages:
            self.last_heard[message.rank] = now
            if isinstance(message, NeedWake):
                if message.wave > self._waves_announced:
                    self._waves_announced = message.wave
                    self.broadcast(Wake(wave=message.wave))
            elif isinstance(message, Failed):
                self._fail(message)
            else:
                kept.append(message)
        return kept

    def _wait_for(
        self, kind: type[Hello] | type[Ready], timeout_s: float, verb: str, on_progress: OnProgress | None = None
    ) -> dict[int, Any]:
        deadline = time.monotonic() + timeout_s
        said_at = time.monotonic()
        seen: dict[int, Any] = {}
        said = ""
        while len(seen) < self.world_size:
            now, missing = time.monotonic(), listed(set(self.ranks) - seen.keys())
            if self._on_wait is not None and missing != said:
                self._on_wait(f"waiting for rank {missing} to {verb}")
                said = missing
            if now > deadline:
                self.kill()
                raise RankLost(f"rank {missing} did not {verb} within {timeout_s:g} s (--startup-timeout)")
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
                    if on_progress is not None and message.rank == 0:
                        on_progress(message.phase, message.done, message.total)
        return seen

    def _has_ranks_elsewhere(self) -> bool:
        """Whether some were not started here, so that somebody may have to do something about them."""
        return len(self._processes) < self.world_size

    def _check_hosts(self) -> None:
        try:
            if self._hosts is not None:
                self._hosts.check()
        except RankLost as error:
            self._hear_last_words()
            self.kill(str(error))
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
            found = self._records.read()
            error = self._cause_of_death(rank, code, found)
            self.kill(str(error))
            raise type(error)(f"{error}{_where(found)}")

    def _cause_of_death(self, rank: int, code: int, found: dict[int, Whereabouts]) -> HocketError:
        """gloo aborts a process that gets a message of another size than it waits for: then ranks are out of step. (NCCL
        aborts one that waited too long.)"""
        how = f"rank {rank} ended unexpectedly ({how_ended(code)})"
        if code == -signal.SIGABRT and self._device == "cpu" and (odd := apart(found) or elsewhere(found, rank)):
            return StepDesync(f"rank {listed(odd)} took one transfer for another; {how}")
        return RankLost(how)

    def _fail(self, first: Failed) -> None:
        """Name the first cause: an error of its own counts before one that only saw another rank go."""
        reports = [first]
        deadline = time.monotonic() + _GATHER_CAUSES_S
        is_over = False
        while not is_over and time.monotonic() < deadline and all(r.kind == RankLost.__name__ for r in reports):
            is_over = not self._may_still_speak(reports)
            reports += [m for m in self._channel.receive(_POLL_S) if isinstance(m, Failed)]
        cause = next((report for report in reports if report.kind != RankLost.__name__), first)
        error = self._error_of(cause, reports)
        self.kill(str(error))
        raise error

    def _may_still_speak(self, reports: list[Failed]) -> set[int]:
        """Ranks without a report whose process has not ended."""
        ended = {rank for rank, process in self._processes.items() if process.poll() is not None}
        return set(self.ranks) - ended - {report.rank for report in reports}

    def _error_of(self, cause: Failed, reports: list[Failed]) -> HocketError:
        """What to raise for a report: with the rank that is to blame, and where each one was, if it is about ranks."""
        found = self._records.read()
        message = cause.message
        if cause.kind in _ABOUT_RANKS:
            message += _where(found)
            if cause.kind == RankLost.__name__ and (lost := self._find_lost(reports, found)):
                return type(lost)(f"{lost}; first noticed by rank {cause.rank}: {message}")
            message = f"on rank {cause.rank}: {message}"
            if cause.kind == StepDesync.__name__ and (odd := apart(found) or elsewhere(found, cause.rank)):
                message = f"rank {listed(odd)} is out of step; {message}"
        error = errors.revive(cause.kind, message)
        error.add_note(f"on rank {cause.rank}:\n{cause.details}")
        return error

    def _find_lost(self, reports: list[Failed], found: dict[int, Whereabouts]) -> HocketError | None:
        """The rank that others lost: one that was killed, else of those that say nothing one that does not run or, as
        far as is known all do, is waited for; else one of all that is.

        A rank may say nothing only because it is slow: its own time-out comes, or its report arrives, later than others.
        """
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and code < 0:
                return self._cause_of_death(rank, code, found)
        try:
            if self._hosts is not None:
                self._hosts.check()
        except RankLost as error:
            return error
        late = behind(found)
        silent = set(self.ranks) - {report.rank for report in reports}
        stopped = silent & lifeless(found, _SHARE_OF_LIMIT * self._step_timeout_s)
        if silent:
            return RankLost(f"rank {listed(stopped or silent & late or silent)} stopped answering")
        return RankLost(f"rank {listed(late)} did not take part in a transfer") if late else None

    def close(self) -> None:
        """Ask every rank to end, wait, and kill what is left."""
        if self.closed:
            return
        try:
            with contextlib.suppress(HocketError):
                self._channel.send(self.ranks, Shutdown())
            deadline = time.monotonic() + _CLOSE_S
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.01))
            if left := [rank for rank, process in self._processes.items() if process.poll() is None]:
                said = "rank %s did not end within %g s of being told to: killed%s"
                logger.warning(said, listed(left), _CLOSE_S, _where(self._records.read()))
        finally:  # also when Ctrl-C comes a second time
            self.kill("")

    def kill(self, why: str = "a rank was lost") -> None:
        """End every process at once and remove the sockets. `why` is for the other hosts."""
        if self.closed:
            return
        self.closed = True
        try:
            if self._hosts is not None:
                self._hosts.close(why)
            end_all(self._processes.values())
            self._channel.close()
            self._records.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)





def _where(found: dict[int, Whereabouts]) -> str:
    return f" ({described(found)})" if found else ""


def _bind_address(folder: str) -> str:
    """Inside one host a socket file; where torchrun spans hosts, TCP on the address the others know."""
    if under_torchrun() and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return f"tcp://{socket.gethostbyname(os.environ['MASTER_ADDR'])}:*"
    return f"ipc://{folder}/front"
