"""Ranks that never get done with capturing a CUDA graph (see patched_ranks.py)."""

from __future__ import annotations

import time
from typing import Any

from hocket.worker.graphs import DecodeGraph


def install() -> None:
    def capture(self: DecodeGraph, pool: Any) -> None:
        time.sleep(60.0)

    DecodeGraph.capture = capture  # type: ignore[method-assign]
