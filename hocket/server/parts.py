"""An answer's parts: reasoning, content, tool calls, and how calls look in answers. Knows no requests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.server.tool_calls import CallFinder, CallPiece
from hocket.tokenizer.reasoning import ReasoningSplit


@dataclass(frozen=True)
class Part:
    """What a piece of an answer brought."""

    reasoning: str
    content: str
    calls: list[CallPiece]


class AnswerParts:
    """Splits one answer, whole or as it comes. start: how it begins (REASONING_STARTS). calls: finds tool calls in what
    follows the reasoning; None: there are none."""

    def __init__(self, start: str, calls: CallFinder | None) -> None:
        self._reasoning = ReasoningSplit(start)
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls that have begun so far."""
        return 0 if self._calls is None else self._calls.num_calls

    def feed(self, piece: str, *, is_last: bool) -> Part:
        """What a piece of the answer brings."""
        reasoning, content = self._reasoning.feed(piece, is_last=is_last)
        if self._calls is None:
            return Part(reasoning, content, [])
        found = self._calls.feed(content, is_last=is_last)
        return Part(reasoning, found.content, found.calls)


def whole_calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """`tool_calls` of an answer that is not streamed."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append({"id": _call_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.arguments
    return calls


def call_chunks(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """`tool_calls` of a chunk."""
    return [
        {"index": piece.index, "function": {"arguments": piece.arguments}}
        if piece.name is None
        else {
            "index": piece.index,
            "id": _call_id(),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
        for piece in pieces
    ]


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
