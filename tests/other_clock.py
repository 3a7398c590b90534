"""A rank with a clock of its own, as on another host (patched_ranks.py)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

AHEAD_NS = 5_000_000_000
RANK = "1"


def install() -> None:
    arguments = sys.orig_argv
    if "--rank" not in arguments or arguments[arguments.index("--rank") + 1] != RANK:
        return
    from hocket.trace import spans

    seconds, nanoseconds = time.perf_counter, time.perf_counter_ns
    time.perf_counter = lambda: seconds() + AHEAD_NS / 1e9  # type: ignore[assignment]
    time.perf_counter_ns = lambda: nanoseconds() + AHEAD_NS  # type: ignore[assignment]
    spans._BOOT = Path("/elsewhere")  # no name there: the host's counts
