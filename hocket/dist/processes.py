"""Processes that this one starts on its host and must not leave behind. Knows nothing of what they do; torch-free."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from hocket.channel.messages import KEY_MARK

_FRONT_KEY = "_HOCKET_FRONT_KEY"  # set by us, for a rank that we start: command lines are seen by all users
_MAX_SOCKET_FOLDER = 70
REMIND_S = 5.0
"""Between two lines that say whom one still waits for."""
_KILLED_S = 10.0
"""A process that a driver holds in the kernel does not end when it is killed: nobody should wait for such ones for ever."""


def private_folder() -> str:
    """A folder that only this user reaches (mode 0700), with a path short enough for sockets in it."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="hocket-", dir=base if len(base) < _MAX_SOCKET_FOLDER else "/tmp")


def rank_environment() -> dict[str, str]:
    """This process's, and what makes ranks import the same code, also from a checkout that is not installed.

    OpenMP's threads must not spin while they wait: where cores are shared, decodes were 25 to 50 times slower.
    """
    env = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return env


def spawn_rank(
    rank: int,
    world_size: int,
    address: str,
    startup_timeout_s: float,
    *,
    store: str | None = None,
    store_fd: int | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a rank that finds the front at `address` and the others by the `store` file, else as `environment` says.

    store_fd: the socket at which it is to serve the group's store. It ends when this process does.
    """
    endpoint, mark, key = address.partition(KEY_MARK)
    # -P: what lies in the current directory must not be taken for a module.
    command = [sys.executable, "-P", "-m", "hocket.start_rank", "--rank", str(rank), "--world-size", str(world_size)]
    command += ["--address", endpoint, "--startup-timeout", str(startup_timeout_s)]
    if store is not None:
        command += ["--store", store]
    if store_fd is not None:
        command += ["--store-fd", str(store_fd)]
    # A session of its own: Ctrl-C in the terminal is for the front, which decides what becomes of the ranks.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=rank_environment() | {_FRONT_KEY: mark + key} | (environment or {}),
        pass_fds=() if store_fd is None else (store_fd,),
        start_new_session=True,
    )


def key_of_front() -> str:
    """In the started rank: what belongs behind its `--address`."""
    return os.environ.pop(_FRONT_KEY, "")


def listed(ranks: Iterable[int]) -> str:
    """Numbers of ranks for a message."""
    return ", ".join(map(str, sorted(ranks)))


def how_ended(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"killed by signal {-exit_code}: {signal.strsignal(-exit_code)}"


def end_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End every process at once and collect it; those that do not end are given up together, after a time."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    deadline = time.monotonic() + _KILLED_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
        if process.stdin is not None:
            process.stdin.close()


def end_with_parent(folder: str | None) -> None:
    """In the started process: the parent holds the other end of standard input. When that is gone, end, at whatever
    point this process is, and remove the `folder` that the parent left."""
    threading.Thread(target=_wait_for_parent, args=(folder,), name="parent-watch", daemon=True).start()


def _wait_for_parent(folder: str | None) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(4)
