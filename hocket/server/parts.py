"""An answer's parts: reasoning, content, tool calls. Knows no requests and no JSON of answers."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.server import tool_calls
from hocket.server.tool_calls import CallPiece, ToolCalls
from hocket.tokenizer.reasoning import ReasoningSplit


@dataclass(frozen=True)
class Part:
    """What a piece of an answer brought."""

    reasoning: str
    content: str
    calls: list[CallPiece]


class AnswerParts:
    """Splits one answer, whole or as it comes. start: how it begins (REASONING_STARTS). tools: the name of the
    tool-call parser; None: calls are content."""

    def __init__(self, start: str, tools: str | None) -> None:
        self._reasoning = ReasoningSplit(start)
        self._tools = None if tools is None else ToolCalls(tool_calls.PARSERS[tools])

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, piece: str, *, is_last: bool) -> Part:
        """What a piece of the answer brings."""
        reasoning, content = self._reasoning.feed(piece, is_last=is_last)
        if self._tools is None:
            return Part(reasoning, content, [])
        found = self._tools.feed(content, is_last=is_last)
        return Part(reasoning, found.content, found.calls)
