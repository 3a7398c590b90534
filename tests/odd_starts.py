"""Ranks that start late or never, or have another idea of the time. For tests only; Python calls these as it starts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

ODD_RANK, LATE_S = "ODD_RANK", "LATE_S"
SKEW_S, DRIFT = 86_400.0 * 40, 1.3


def is_odd() -> bool:
    """Whether this process is the rank that ODD_RANK names ("hocket.start_rank --rank n …")."""
    given = sys.orig_argv
    return "--rank" in given and given[given.index("--rank") + 1] == os.environ[ODD_RANK]


def late() -> None:
    if is_odd():
        time.sleep(float(os.environ[LATE_S]))


def skewed() -> None:
    """All clocks are weeks ahead and run too fast; sleeping takes as long as ever."""
    if not is_odd():
        return
    for name in ("time", "monotonic", "perf_counter"):
        read_ns = getattr(time, f"{name}_ns")
        began = read_ns()

        def wrong_ns(read_ns: Callable[[], int] = read_ns, began: int = began) -> int:
            return began + int(SKEW_S * 1e9 + (read_ns() - began) * DRIFT)

        wrong: Any = lambda wrong_ns=wrong_ns: wrong_ns() / 1e9  # noqa: E731
        setattr(time, f"{name}_ns", wrong_ns)
        setattr(time, name, wrong)
