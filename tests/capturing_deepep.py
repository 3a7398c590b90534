"""Ranks that capture DeepEP's high-throughput transfers too, though they do not say that they can (see
patched_ranks.py)."""

from __future__ import annotations

from hocket.moe.transport.deepep_high_throughput import DeepEPHighThroughput


def install() -> None:
    DeepEPHighThroughput.captures = True
