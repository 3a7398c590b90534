"""A progress bar on standard error, only where that is a terminal. Knows nothing of what is counted, but bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """`with Bar("loading") as bar: bar.update(done, total)`. Silent when not enabled or not on a terminal.

    in_bytes: what is counted, shown in MB or GB and with the rate.
    """

    def __init__(self, what: str, *, enabled: bool = True, in_bytes: bool = False) -> None:
        self._what = what
        self._in_bytes = in_bytes
        self._enabled = enabled and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        if self._enabled:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TransferSpeedColumn,
            )

            counts = (DownloadColumn(), TransferSpeedColumn()) if self._in_bytes else (MofNCompleteColumn(),)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *counts,
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=None)
        return self

    def update(self, done: int, total: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


class StartUpBars:
    """`with StartUpBars() as bars: bars.update(phase, done, total)`: a bar for each phase, one after the other."""

    _PHASES: Mapping[str, tuple[str, bool]] = {
        "compile": ("compiling kernels", False),
        "load": ("loading weights", True),
        "warm up": ("running split steps", False),
        "capture": ("capturing CUDA graphs", False),
        "compare": ("comparing split CUDA graphs", False),
    }
    """By phase: what is shown, and whether it is counted in bytes."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._phase = ""
        self._bar: Bar | None = None

    def __enter__(self) -> StartUpBars:
        self._begin("load")
        return self

    def update(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._end()
            self._begin(phase)
        assert self._bar is not None
        self._bar.update(done, total)

    def _begin(self, phase: str) -> None:
        what, in_bytes = self._PHASES[phase]
        self._phase, self._bar = phase, Bar(what, enabled=self._enabled, in_bytes=in_bytes).__enter__()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def __exit__(self, *_: object) -> None:
        self._end()
