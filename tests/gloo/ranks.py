"""Runs functions on long-lived ranks: spawned processes joined by gloo, watched by a time-out. For tests only."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT_S = 60.0
GROUP_TIMEOUT_S = 15.0
GRACE_S = 2.0
"""How long the other ranks may go on once one has failed; they are likely to wait for it in a collective."""


@dataclass(frozen=True)
class RankEnv:
    """What a function gets as its first argument: its rank, and `groups[n]`, the group of ranks 0 to n − 1."""

    rank: int
    groups: dict[int, dist.ProcessGroup]


class RanksFailed(AssertionError):
    """A rank raised, died or was late; the message names ranks and holds the first traceback."""


class RankPool:
    """Up to `num_ranks` ranks, started at the first `run` and again after a failure (a broken group stays broken)."""

    def __init__(self, num_ranks: int, timeout_s: float = 30.0) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder = ""

    def run(
        self, function: Callable[..., Any], *args: Any, num_ranks: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """`function(env, *args)` on the first `num_ranks` ranks; the results in rank order.

        `function` must be importable (at the top level of a module). Raises RanksFailed.
        """
        if not self._ranks:
            self._start()
        count = num_ranks or self.num_ranks
        for _, pipe in self._ranks[:count]:
            pipe.send((function, args))
        return self._collect(count, timeout_s or self.timeout_s)

    def close(self) -> None:
        """Kill the ranks that this pool started; the next `run` starts new ones."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            args = (rank, self.num_ranks, os.path.join(self._folder, "store"), there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        self._collect(self.num_ranks, START_TIMEOUT_S)

    def _collect(self, count: int, timeout_s: float) -> list[Any]:
        """One answer from each of the first `count` ranks; where that fails, the end of all ranks and RanksFailed."""
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:count])}
        results: list[Any] = [None] * count
        errors: list[str] = []
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                is_good, results[rank] = _receive(pipe)
                if not is_good:
                    errors.append(f"rank {rank}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors or waiting:
            self.close()
            raise RanksFailed("\n".join([*errors, f"ranks late: {sorted(waiting.values())}"]))
        return results


def _receive(pipe: Any) -> tuple[bool, Any]:
    try:
        is_good, value = pipe.recv()
    except EOFError:
        return False, "died"
    return is_good, value


def _serve(rank: int, num_ranks: int, store_path: str, pipe: Connection) -> None:
    """A rank's life: join, then run what comes through the pipe until it is killed or the pipe ends."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(store_path, num_ranks)
    limit = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, num_ranks + 1)}
    env = RankEnv(rank, groups)
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(env, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
