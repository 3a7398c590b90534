"""Starts the rank processes, watches them, and speaks to them. Knows nothing of prompts or models; torch-free.

On one host the ranks are spawned here. Under `torchrun` this runs in rank 0's process, which starts rank 0's worker;
the other ranks are torchrun's and find the front through the group's store.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
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
from hocket.dist.processes import end_all, how_ended, private_folder, rank_environment
from hocket.dist.record import Records, Whereabouts, apart, behind, described, elsewhere, lifeless
from hocket.errors import HocketError, RankLost, StepDesync

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

    def __init__(self, world_size: int, startup_timeout_s: float, on_wait: OnWait | None = None) -> None:
        self.world_size = world_size
        self.ranks = range(world_size)
        self._startup_timeout_s = startup_timeout_s
        self._on_wait = on_wait
        self._device, self._step_timeout_s = "cpu", math.inf
        self._folder = private_folder()
        self._channel = FrontChannel(_bind_address(self._folder))
        self._records = Records(self._folder, world_size, create=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._waves_announced = 0
        self.last_heard = dict.fromkeys(self.ranks, 0.0)
        self.pids: dict[int, int] = {}
        self.closed = False
        self._checked_at = 0.0

    @classmethod
    def start(cls, world_size: int, startup_timeout_s: float, on_wait: OnWait | None = None) -> RankGroup:
        """Start all ranks and wait until each has joined.

        Raises:
            RankLost: a rank did not start within the limit, or died; names it.
        """
        group = cls(world_size, startup_timeout_s, on_wait)
        try:
            spawned = [0] if under_torchrun() else group.ranks
            for rank in spawned:
                group._spawn(rank)
            group._wait_for(Hello, startup_timeout_s, "start")
        except BaseException:
            group.kill()
            raise
        return group

    def _spawn(self, rank: int) -> None:
        # -P: what lies in the current directory must not be taken for a module.
        command = [sys.executable, "-P", "-m", "hocket.rank", "--rank", str(rank), "--world-size", str(self.world_size)]
        command += ["--address", self._channel.address, "--startup-timeout", str(self._startup_timeout_s)]
        if not under_torchrun():
            command += ["--store", f"{self._folder}/store"]
        # A session of its own: Ctrl-C in the terminal is for the front, which decides what becomes of the ranks.
        self._processes[rank] = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=rank_environment(), start_new_session=True
        )

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
        seen: dict[int, Any] = {}
        said = ""
        while len(seen) < self.world_size:
            missing = _listed(set(self.ranks) - seen.keys())
            if self._on_wait is not None and missing != said:
                self._on_wait(f"waiting for rank {missing} to {verb}")
                said = missing
            if time.monotonic() > deadline:
                self.kill()
                raise RankLost(f"rank {missing} did not {verb} within {timeout_s:g} s (--startup-timeout)")
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

    def _check_processes(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is None:
                continue
            for message in self._channel.receive(_POLL_S):  # its last words may still be on the way
                if isinstance(message, Failed):
                    self._fail(message)
            found = self._records.read()
            error = self._cause_of_death(rank, code, found)
            self.kill()
            raise type(error)(f"{error}{_where(found)}")

    def _cause_of_death(self, rank: int, code: int, found: dict[int, Whereabouts]) -> HocketError:
        """gloo aborts a process that gets a message of another size than it waits for: then ranks are out of step. (NCCL
        aborts one that waited too long.)"""
        how = f"rank {rank} ended unexpectedly ({how_ended(code)})"
        if code == -signal.SIGABRT and self._device == "cpu" and (odd := apart(found) or elsewhere(found, rank)):
            return StepDesync(f"rank {_listed(odd)} took one transfer for another; {how}")
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
        self.kill()
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
                message = f"rank {_listed(odd)} is out of step; {message}"
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
        late = behind(found)
        silent = set(self.ranks) - {report.rank for report in reports}
        stopped = silent & lifeless(found, _SHARE_OF_LIMIT * self._step_timeout_s)
        if silent:
            return RankLost(f"rank {_listed(stopped or silent & late or silent)} stopped answering")
        return RankLost(f"rank {_listed(late)} did not take part in a transfer") if late else None

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
        finally:  # also when Ctrl-C comes a second time
            self.kill()

    def kill(self) -> None:
        """End every process at once and remove the sockets."""
        if self.closed:
            return
        self.closed = True
        try:
            end_all(self._processes.values())
            self._channel.close()
            self._records.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)





def _where(found: dict[int, Whereabouts]) -> str:
    return f" ({described(found)})" if found else ""


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _bind_address(folder: str) -> str:
    """Inside one host a socket file; where torchrun spans hosts, TCP on the address the others know."""
    if under_torchrun() and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return f"tcp://{socket.gethostbyname(os.environ['MASTER_ADDR'])}:*"
    return f"ipc://{folder}/front"
