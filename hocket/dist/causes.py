"""Why a group of ranks failed: its first cause, and which rank is to blame. Ends nothing; knows no model; torch-free."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from hocket import errors
from hocket.channel.messages import Failed, RankMessage
from hocket.dist.hosts import Hosts
from hocket.dist.processes import how_ended, listed
from hocket.dist.record import Records, Whereabouts, apart, behind, described, elsewhere, lifeless
from hocket.errors import HocketError, RankLost, StepDesync

_GATHER_CAUSES_S = 2.0
_SHARE_OF_LIMIT = 0.5
"""Of a step's limit: a process that has not run for so long is what the others waited for, since they waited it all."""
_ABOUT_RANKS = ("RankLost", "StepDesync", "BatonTimeout", "OverlapError")


class Causes:
    """Finds them for one group, of which it reads this host's `processes`, all `records` and the other `hosts`.

    device, step_timeout_s: of the engine that the ranks run, as soon as they have one.
    """

    def __init__(
        self,
        ranks: range,
        processes: Mapping[int, subprocess.Popen[bytes]],
        records: Records,
        hosts: Hosts | None,
    ) -> None:
        self._ranks = ranks
        self._processes = processes
        self._records = records
        self._hosts = hosts
        self.device, self.step_timeout_s = "cpu", math.inf

    def of_reports(self, first: Failed, listen: Callable[[], list[RankMessage]]) -> HocketError:
        """The first cause: an error of its own counts before one that only saw another rank go.

        listen: waits a moment and gives what ranks have said; asked for a while, as other ranks may know better.
        """
        reports = [first]
        deadline = time.monotonic() + _GATHER_CAUSES_S
        is_over = False
        while not is_over and time.monotonic() < deadline and all(r.kind == RankLost.__name__ for r in reports):
            is_over = not self._may_still_speak(reports)
            reports += [m for m in listen() if isinstance(m, Failed)]
        cause = next((report for report in reports if report.kind != RankLost.__name__), first)
        return self._error_of(cause, reports)

    def of_death(self, rank: int, code: int, found: dict[int, Whereabouts]) -> HocketError:
        """Why a process has ended with `code`; found: where each rank was.

        gloo aborts a process that gets a message of another size than it waits for: then ranks are out of step. (NCCL
        aborts one that waited too long.)
        """
        how = f"rank {rank} ended unexpectedly ({how_ended(code)})"
        if code == -signal.SIGABRT and self.device == "cpu" and (odd := apart(found) or elsewhere(found, rank)):
            return StepDesync(f"rank {listed(odd)} took one transfer for another; {how}")
        return RankLost(how)

    def _may_still_speak(self, reports: list[Failed]) -> set[int]:
        """Ranks without a report whose process has not ended."""
        ended = {rank for rank, process in self._processes.items() if process.poll() is not None}
        return set(self._ranks) - ended - {report.rank for report in reports}

    def _error_of(self, cause: Failed, reports: list[Failed]) -> HocketError:
        """What to raise for a report: with the rank that is to blame, and where each one was, if it is about ranks."""
        found = self._records.read()
        message = cause.message
        if cause.kind in _ABOUT_RANKS:
            message += where(found)
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
                return self.of_death(rank, code, found)
        try:
            if self._hosts is not None:
                self._hosts.check()
        except RankLost as error:
            return error
        late = behind(found)
        silent = set(self._ranks) - {report.rank for report in reports}
        stopped = silent & lifeless(found, _SHARE_OF_LIMIT * self.step_timeout_s)
        if silent:
            return RankLost(f"rank {listed(stopped or silent & late or silent)} stopped answering")
        return RankLost(f"rank {listed(late)} did not take part in a transfer") if late else None


def where(found: dict[int, Whereabouts]) -> str:
    """For the end of a message: where each rank is, if anything is known of them."""
    return f" ({described(found)})" if found else ""
