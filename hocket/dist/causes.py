"""Which failure of a rank was the first cause, of all that ranks, processes and other hosts report. Ends nothing.

A rank that dies makes all others fail, on every host, and who is heard first is chance. Torch-free.
"""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Mapping

from hocket import errors
from hocket.channel.front import FrontChannel
from hocket.channel.messages import Failed, RankMessage
from hocket.dist.hosts import FromElsewhere
from hocket.dist.processes import how_ended, listed
from hocket.dist.record import Records, Whereabouts, apart, behind, described, elsewhere, lifeless
from hocket.dist.servers import Member, Others
from hocket.errors import HocketError, RankLost, StepDesync

_POLL_S = 0.1
_GATHER_S = 2.0
_VERDICT_S = 4.0
"""How long a server waits for what the first one makes of a failure, which gathers reports meanwhile."""
_SHARE_OF_LIMIT = 0.5
"""Of a step's limit: a process that has not run for so long is what the others waited for, since they waited it all."""
_ABOUT_RANKS = ("RankLost", "StepDesync", "BatonTimeout", "OverlapError")


class Causes:
    """Of one group's failures. processes: this host's ranks. device, step_timeout_s: of the engine, once there is one."""

    device = "cpu"
    step_timeout_s = math.inf

    def __init__(
        self,
        world_size: int,
        channel: FrontChannel,
        processes: Mapping[int, subprocess.Popen[bytes]],
        records: Records,
        hosts: Others | None,
    ) -> None:
        self._world_size = world_size
        self._channel = channel
        self._processes = processes
        self._records = records
        self._hosts = hosts

    def of(self, first: Failed) -> HocketError:
        """The cause, where a rank of this host or one behind another's server has failed."""
        return self._verdict(first) or self._judged(first)

    def of_death(self, rank: int, exit_code: int) -> HocketError:
        """The cause, where a rank's process on this host ended."""
        found = self._records.read()
        error = self._cause_of_death(rank, exit_code, found)
        return type(error)(f"{error}{where(found)}")

    def _cause_of_death(self, rank: int, code: int, found: dict[int, Whereabouts]) -> HocketError:
        """gloo aborts a process that gets a message of another size than it waits for: then ranks are out of step. (NCCL
        aborts one that waited too long.)"""
        how = f"rank {rank} ended unexpectedly ({how_ended(code)})"
        if code == -signal.SIGABRT and self.device == "cpu" and (odd := apart(found) or elsewhere(found, rank)):
            return StepDesync(f"rank {listed(odd)} took one transfer for another; {how}")
        return RankLost(how)

    def _verdict(self, first: Failed) -> HocketError | None:
        """What the first server makes of a failure, which hears of those on all hosts; None where this one must."""
        if not isinstance(self._hosts, Member):
            return None
        self._hosts.report(first)
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            try:
                self._hosts.check()
            except HocketError as error:
                return error
            if (killed := self._killed(self._records.read())) is not None:
                return killed
            for message in self._channel.receive(_POLL_S):
                if isinstance(message, Failed):
                    self._hosts.report(message)
        return None

    def _judged(self, first: Failed) -> HocketError:
        """An error of its own counts before one that only saw another rank go."""
        reports = [first]
        deadline = time.monotonic() + _GATHER_S
        is_over = False
        while not is_over and time.monotonic() < deadline and all(r.kind == RankLost.__name__ for r in reports):
            is_over = not self._may_still_speak(reports)
            messages: list[RankMessage | FromElsewhere] = [*self._channel.receive(_POLL_S)]
            try:
                messages += self._hosts.check() if self._hosts is not None and self._hosts.config.own_server else []
            except HocketError:  # which is the cause: asked again it says so
                is_over = True
            reports += [m for m in messages if isinstance(m, Failed)]
        cause = next((report for report in reports if report.kind != RankLost.__name__), first)
        return self._error_of(cause, reports)

    def _may_still_speak(self, reports: list[Failed]) -> set[int]:
        """Ranks without a report whose process has not ended, as far as is known."""
        ended = {rank for rank, process in self._processes.items() if process.poll() is not None}
        return set(range(self._world_size)) - ended - {report.rank for report in reports}

    def _error_of(self, cause: Failed, reports: list[Failed]) -> HocketError:
        """What to raise for a report: with the rank that is to blame, and where each one was, if it is about ranks."""
        found = self._records.read()
        message = cause.message
        if cause.kind in _ABOUT_RANKS:
            message += where(found)
            if cause.kind == RankLost.__name__ and (lost := self._find_lost(reports, found)):
                return errors.revive(type(lost).__name__, f"{lost}; first noticed by rank {cause.rank}: {message}")
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
        if (killed := self._killed(found)) is not None:
            return killed
        try:
            if self._hosts is not None:
                self._hosts.check()
        except HocketError as error:
            return error
        late = behind(found)
        silent = set(range(self._world_size)) - {report.rank for report in reports}
        stopped = silent & lifeless(found, _SHARE_OF_LIMIT * self.step_timeout_s)
        if silent:
            return RankLost(f"rank {listed(stopped or silent & late or silent)} stopped answering")
        return RankLost(f"rank {listed(late)} did not take part in a transfer") if late else None

    def _killed(self, found: dict[int, Whereabouts]) -> HocketError | None:
        """The error of a rank here that a signal ended."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and code < 0:
                return self._cause_of_death(rank, code, found)
        return None


def where(found: dict[int, Whereabouts]) -> str:
    """In brackets, for the end of a line: where each rank is; "" where none is known."""
    return f" ({described(found)})" if found else ""
