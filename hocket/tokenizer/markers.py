"""Finds markers in text that comes in pieces. Knows no marker's meaning."""

from __future__ import annotations

from collections.abc import Sequence


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `markers` begins, and which it is; None: none is there."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def num_settled(text: str, markers: Sequence[str]) -> int:
    """How many characters of a text without markers can be told apart from what may follow: not those at its end that
    may begin a marker, and not the white space before one."""
    longest = max((_overlap(text, marker) for marker in markers), default=0)
    return len(text[: len(text) - longest].rstrip())


def _overlap(text: str, marker: str) -> int:
    """The most characters at the end of a text that begin the marker, short of all of it."""
    most = min(len(marker) - 1, len(text))
    return next((length for length in range(most, 0, -1) if text.endswith(marker[:length])), 0)
