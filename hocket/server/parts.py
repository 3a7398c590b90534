"""An answer's parts: reasoning, content, tool calls. Knows no requests and no JSON of answers."""

from __future__ import annotations

from dataclasses import dataclass

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
