"""Columns of `hocket bench serve`'s results: servers beside each other, and the first one against the others.

The servers of a result were loaded in turn, with the same requests in each turn. So a ratio is the median over the
turns, with the least and the largest; it is told only where all runs of one server lie apart from all of the other. Of
two that are equal n runs each lie so by chance in 2 n!² of (2n)! cases: in every third with 2, in one of 35 with 4.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
MIN_RUNS = 4
"""Of each server; with fewer, chance sets them apart too often for a ratio to mean something."""
AGAINST = "first"
"""By this name a row has that of its result's first server, if it is of another one."""


def ratio(row: Row, key: str) -> str:
    """A figure over the first server's; "" where there is none, and words instead of what noise may have made."""
    first = row.get(AGAINST) or {}
    mine, theirs = (_known((one.get("runs") or {}).get(key)) for one in (row, first))
    if not first or not mine or not theirs:
        return ""
    if (num_runs := min(len(mine), len(theirs))) < MIN_RUNS:
        return f"too few runs ({num_runs} of {MIN_RUNS})"
    if min(mine) <= max(theirs) and min(theirs) <= max(mine):
        return "within the spread"
    ratios = [one / other for one, other in zip(mine, theirs, strict=False)]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f} – {max(ratios):.2f}]"


def _known(values: Sequence[float | None] | None) -> list[float]:
    """None, where a run has no figure, leaves none of all."""
    found = [value for value in values or () if value]
    return found if len(found) == len(values or ()) else []


def _load(row: Row) -> str:
    load = row["load"]
    prompts = f"{load['input_len']}" if load["prompts_file"] is None else Path(load["prompts_file"]).name
    rate = "all at once" if load["request_rate"] is None else f"{load['request_rate']:g}/s {load['arrivals']}"
    most = "" if load["max_concurrency"] is None else f", at most {load['max_concurrency']} at once"
    kind = "chats" if load["chat"] else "requests"
    return f"{load['num_prompts']} {kind} of {prompts} + {load['output_len']} tokens, {rate}{most}"


def _figure(key: str, digits: int) -> Callable[[Row], str]:
    """The median, with the range of the runs' own figures."""

    def shown(row: Row) -> str:
        value, runs = row.get(key), _known((row.get("runs") or {}).get(key))
        value = value["median"] if isinstance(value, dict) else value
        if value is None:
            return ""
        text = f"{value:,.{digits}f}"
        return f"{text} [{min(runs):,.{digits}f} – {max(runs):,.{digits}f}]" if len(runs) > 1 else text

    return shown


def _p99(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]['p99']:,.1f}" if row.get(key) else ""


def _failed(row: Row) -> str:
    return str(row["num_failed"]) if row["num_failed"] else ""


def _of(title: str, key: str, digits: int) -> list[Column]:
    return [(title, _figure(key, digits)), (f"{title} × first", lambda row: ratio(row, key))]


def _time(title: str, key: str) -> list[Column]:
    return [*_of(f"{title}, ms", key, 1), (f"{title}, p99", _p99(key))]


SETTINGS: list[Column] = [("load", _load), ("runs", lambda row: str(row["repeats"]))]
FIGURES: list[Column] = [
    ("server", lambda row: str(row["url"])),
    *_of("requests/s", "requests_per_s", 2),
    *_of("output tokens/s", "output_tokens_per_s", 1),
    *_time("first token", "ttft_ms"),
    *_time("per token after", "tpot_ms"),
    *_time("between tokens", "itl_ms"),
    *_time("whole answer", "e2e_ms"),
    ("FAILED", _failed),
]
