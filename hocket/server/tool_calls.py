"""Finds tool calls in an answer, as model families write them. Knows no requests and no JSON of answers.

Text comes in pieces; how it is cut makes no difference. Arguments are passed on as they are written, piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hocket.tokenizer.markers import first_marker, num_settled


@dataclass(frozen=True)
class Syntax:
    """How a family writes calls: `begin` head arguments … `end`. Everything outside is content, but for `silent` marks.

    head: from `begin` to the arguments, a JSON object, with the group `name`. whole: the name and arguments of a call
    that has another form; None where it is none: then it is content. Marks begin with a character that occurs neither
    later in a mark nor in JSON outside of text.
    """

    begin: str
    end: str
    silent: tuple[str, ...]
    head: re.Pattern[str]
    whole: Callable[[str], tuple[str, str] | None]

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end, *self.silent


class CallFinder(Protocol):
    """Splits one answer."""

    num_calls: int

    def feed(self, piece: str, *, is_last: bool = False) -> Found:
        """What a piece of the answer brings."""
        ...


@dataclass(frozen=True)
class CallPiece:
    """More of the call number `index`. name: of a call that begins."""

    index: int
    name: str | None
    arguments: str


@dataclass
class Found:
    """What a piece of an answer brought."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolCalls:
    """Splits one answer. White space before and between calls is left out."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._kept = ""
        self.num_calls = 0
        self._part: Callable[[Found, bool], bool] = self._outside
        self._value = _Value()

    def feed(self, piece: str, *, is_last: bool = False) -> Found:
        """What a piece of the answer brings."""
        self._kept += piece
        found = Found()
        while self._part(found, is_last):
            pass
        return found

    def _outside(self, found: Found, is_last: bool) -> bool:
        """Content. Whether there is more to look at, as for all parts."""
        first = first_marker(self._kept, self._syntax.marks)
        if first is None:
            end = num_settled(self._kept, self._syntax.marks)
            if is_last:
                end = len(self._kept.rstrip()) if self.num_calls else len(self._kept)
            found.content += self._kept[:end]
            self._kept = self._kept[end:]
            return False
        at, mark = first
        found.content += self._kept[:at].rstrip()
        self._kept = self._kept[at + len(mark) :]
        if mark == self._syntax.begin:
            self._part = self._head
        return True

    def _head(self, found: Found, is_last: bool) -> bool:
        """The name, up to where the arguments begin."""
        end = self._kept.find(self._syntax.end)
        head = self._syntax.head.match(self._kept)
        if head is not None and (end < 0 or head.end() <= end):
            self._begin_call(found, _text(head["name"]), "")
            self._kept = self._kept[head.end() :]
            self._value = _Value()
            self._part = self._arguments
            return True
        if end < 0 and not is_last:
            return False
        block = self._kept if end < 0 else self._kept[:end]
        self._kept = "" if end < 0 else self._kept[end + len(self._syntax.end) :]
        self._part = self._outside
        whole = self._syntax.whole(block)
        if whole is not None:
            self._begin_call(found, *whole)
        else:
            found.content += self._syntax.begin + block + ("" if end < 0 else self._syntax.end)
        return bool(self._kept)

    def _begin_call(self, found: Found, name: str, arguments: str) -> None:
        found.calls.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1

    def _arguments(self, found: Found, is_last: bool) -> bool:
        """The arguments, up to their end."""
        end = self._value.end(self._kept)
        text = self._kept if end is None else self._kept[:end]
        if text:
            found.calls.append(CallPiece(self.num_calls - 1, None, text))
        self._kept = self._kept[len(text) :]
        if end is not None:
            self._part = self._after
        return end is not None

    def _after(self, found: Found, is_last: bool) -> bool:
        """From the arguments to the call's end, which holds nothing."""
        first = first_marker(self._kept, (self._syntax.begin, self._syntax.end))
        if first is None:
            self._kept = self._kept[num_settled(self._kept, self._syntax.marks) :]
            return False
        at, mark = first
        self._kept = self._kept[at + len(mark) :]
        self._part = self._head if mark == self._syntax.begin else self._outside
        return True


class OneCall:
    """An answer that is, by its grammar, the arguments of a call of one tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, piece: str, *, is_last: bool = False) -> Found:
        """What a piece of the answer brings."""
        name = None if self.num_calls else self._name
        self.num_calls = 1
        return Found(calls=[CallPiece(0, name, piece)] if piece or name else [])


class ListedCalls:
    """An answer that is, by its grammar, a list of objects with a `name` and then `parameters`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._kept = ""
        self._value: _Value | None = None

    def feed(self, piece: str, *, is_last: bool = False) -> Found:
        """What a piece of the answer brings."""
        self._kept += piece
        found = Found()
        while self._kept:
            if self._value is None:
                head = _LISTED.match(self._kept)
                if head is None:
                    break
                found.calls.append(CallPiece(self.num_calls, _text(head["name"]), ""))
                self.num_calls += 1
                self._kept, self._value = self._kept[head.end() :], _Value()
            end = self._value.end(self._kept)
            text = self._kept if end is None else self._kept[:end]
            found.calls.append(CallPiece(self.num_calls - 1, None, text))
            self._kept = self._kept[len(text) :]
            self._value = self._value if end is None else None
        return found


class _Value:
    """Finds the end of a JSON object. What stands where JSON cannot have it ends it, too."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def end(self, piece: str) -> int | None:
        """Where in the next piece the object ends; None: it goes on."""
        for at, char in enumerate(piece):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
            elif char == "<":
                return at
        return None


_STRING = r'"(?P<name>(?:[^"\\]|\\.)*)"'


_LISTED = re.compile(rf'[\s\[,}}]*\{{\s*"name"\s*:\s*{_STRING}\s*,\s*"parameters"\s*:\s*(?=\{{)', re.DOTALL)


def _text(escaped: str) -> str:
    """The text of what stands within a JSON text's quotes, or within none."""
    try:
        return str(json.loads(f'"{escaped}"')) if "\\" in escaped else escaped
    except ValueError:
        return escaped


def _of_object(block: str) -> tuple[str, str] | None:
    """A call as a JSON object, its parts in any order and its arguments an object, text, or missing."""
    try:
        call: Any = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        return call["name"], "{}"
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _nothing(block: str) -> None:
    return None


_SEP = "<\uff5ctool\u2581sep\uff5c>"


def _deepseek(head: str) -> Syntax:
    return Syntax(
        begin="<\uff5ctool\u2581call\u2581begin\uff5c>",
        end="<\uff5ctool\u2581call\u2581end\uff5c>",
        silent=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        head=re.compile(head, re.DOTALL),
        whole=_nothing,
    )


PARSERS = {
    "hermes": Syntax(
        begin="<tool_call>",
        end="</tool_call>",
        silent=(),
        head=re.compile(rf'\s*\{{\s*"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL),
        whole=_of_object,
    ),
    "deepseek_v3": _deepseek(rf"\s*function{_SEP}\s*(?P<name>[^\s<{{]+)\s*```(?:json)?\s*(?=\{{)"),
    "deepseek_v31": _deepseek(rf"\s*(?P<name>[^\s<{{]+)\s*{_SEP}\s*(?=\{{)"),
}
"""By the name of a tool-call parser."""
