"""Runs a probe in processes of its own, for a limited time. Knows no probe; torch-free."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.dist.processes import end_all, how_ended, private_folder, rank_environment
from hocket.dist.record import Records
from hocket.doctor.child import notes_file

_POLL_S = 0.05
_GRACE_S = 2.0
"""What the others get when one process has failed: they may know more, or wait for it for ever."""


@dataclass
class Outcome:
    """What became of one process: what it reported, where it was last, and why it did not end well (None: it did)."""

    found: list[Any] = field(default_factory=list)
    at: str = "starting"
    error: str | None = None
    is_late: bool = False


def run(
    module: str,
    arguments: dict[str, Any],
    *,
    count: int = 1,
    limit_s: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """`module`'s `probe` in `count` processes with the same arguments; all have ended when this returns or raises.

    limit_s: after so many seconds they are ended, and their outcomes say where they were.
    """
    folder = private_folder()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        Path(folder, "arguments").write_text(json.dumps({"count": count, "arguments": arguments}), encoding="utf-8")
        Records(folder, count, create=True).close()  # as a launcher of ranks does
        for index in range(count):
            processes.append(_start(module, folder, index))
        is_over = _wait(folder, processes, time.monotonic() + limit_s, on_progress)
        codes = [process.poll() for process in processes]
        end_all(processes)
        return [_outcome(folder, index, code, None if is_over else limit_s) for index, code in enumerate(codes)]
    finally:  # also on Ctrl-C
        end_all(processes)
        shutil.rmtree(folder, ignore_errors=True)


def problems(what: str, outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each process that did not end well; of several the number is named."""
    lines = []
    for index, outcome in enumerate(outcomes):
        if outcome.error is not None:
            who = what if len(outcomes) == 1 else f"{what}, process {index} of {len(outcomes)}"
            lines.append(f"{who}: {outcome.error}")
    return lines


def _start(module: str, folder: str, index: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "hocket.doctor.child", module, folder, str(index)]
    env = rank_environment() | {"TORCHINDUCTOR_CACHE_DIR": folder}  # fake tensors make that folder, and leave it empty
    with _log_file(folder, index).open("wb") as log:
        # A session of its own: Ctrl-C in the terminal is for the front, which ends it.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def _wait(
    folder: str, processes: Sequence[subprocess.Popen[bytes]], deadline: float, on_progress: Callable[[str], None]
) -> bool:
    """Until all have ended, or one has failed and the others have had their grace; False when the deadline passed."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
            while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return True
        if time.monotonic() > deadline:
            return False
        on_progress(_read(folder, 0).at)
        time.sleep(_POLL_S)
    return True


def _outcome(folder: str, index: int, code: int | None, limit_s: float | None) -> Outcome:
    """code: None where the process had to be ended; limit_s: where time ran out."""
    outcome = _read(folder, index)
    if code is None and limit_s is not None:
        outcome.is_late = True
        outcome.error = f"hangs: not done after {limit_s:g} s, while {outcome.at}"
    elif code is None:
        outcome.error = f"was ended while {outcome.at}, because another process failed"
    elif code != 0 and outcome.error is None:
        outcome.error = f"{how_ended(code)}, while {outcome.at}{_last_words(folder, index)}"
    return outcome


def _read(folder: str, index: int) -> Outcome:
    outcome = Outcome()
    path = notes_file(folder, index)
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []  # the last may be half written
    for line in lines:
        entry = json.loads(line)
        if "found" in entry:
            outcome.found.append(entry["found"])
        outcome.at = entry.get("at", outcome.at)
        outcome.error = entry.get("error", outcome.error)
    return outcome


def _log_file(folder: str, index: int) -> Path:
    return Path(folder, f"log-{index}")


def _last_words(folder: str, index: int) -> str:
    """The last line that the process or a library in it printed."""
    lines = _log_file(folder, index).read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f"; it said last: {said[-1]}" if said else ""
