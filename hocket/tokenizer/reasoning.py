"""Tells reasoning, which models write as <think>…</think>, from what follows it. Knows no requests and no answers.

Text comes in pieces; how it is cut makes no difference.
"""

from __future__ import annotations

from hocket.request import REASONING_STARTS
from hocket.tokenizer.markers import num_settled

BEGIN, END = "<think>", "</think>"
PARSERS = {"deepseek_r1": "open", "deepseek_v3": "maybe", "qwen3": "maybe"}
"""By the name of a reasoning parser: how outputs begin where their prompt leaves it open."""


def reasoning_start(parser: str, prompt: str, *, continued: str | None = None) -> str:
    """How the output of a prompt begins, one of REASONING_STARTS: chat templates may write <think>, or <think></think>
    where the model is not to think, at the prompt's end. continued: the message that the output goes on with."""
    if continued is not None:
        return "open" if continued.rfind(BEGIN) > continued.rfind(END) else "none"
    end = prompt[-64:].rstrip()
    if end.endswith(BEGIN):
        return "open"
    return "none" if end.endswith(END) else PARSERS[parser]


class ReasoningSplit:
    """Splits one output. White space around the reasoning, and the marks, are left out."""

    def __init__(self, start: str) -> None:
        assert start in REASONING_STARTS
        self._kept = ""
        self._part = "content" if start == "none" else "start"
        self._is_open = start == "open"
        self._has_reasoned = False

    def feed(self, piece: str, *, is_last: bool = False) -> tuple[str, str]:
        """More reasoning and more content, of a piece of the output."""
        if self._part == "content":
            return "", piece
        self._kept += piece
        if self._part == "start" and not self._begins(is_last):
            return "", ""
        reasoning = self._more_reasoning(is_last) if self._part == "reasoning" else ""
        if self._part == "after":
            self._kept = self._kept.lstrip()
            if self._kept:
                self._part = "content"
        if self._part != "content":
            return reasoning, ""
        content, self._kept = self._kept, ""
        return reasoning, content

    def _begins(self, is_last: bool) -> bool:
        """Whether it is clear by now with what the output begins."""
        text = self._kept.lstrip()
        if not is_last and len(text) < len(BEGIN) and BEGIN.startswith(text):
            return False
        has_mark = text.startswith(BEGIN)
        self._part = "reasoning" if self._is_open or has_mark else "content"
        if self._part == "reasoning":
            self._kept = text.removeprefix(BEGIN)
        return True

    def _more_reasoning(self, is_last: bool) -> str:
        """What is certain to be reasoning."""
        if not self._has_reasoned:
            self._kept = self._kept.lstrip()
        at = self._kept.find(END)
        if at >= 0:
            found, self._kept, self._part = self._kept[:at].rstrip(), self._kept[at + len(END) :], "after"
            return found
        end = len(self._kept.rstrip()) if is_last else num_settled(self._kept, (END,))
        found, self._kept = self._kept[:end], self._kept[end:]
        self._has_reasoned = self._has_reasoned or bool(found)
        return found


class ContentStart:
    """Where the content of a growing output begins, for what applies to content only."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._num_seen = 0
        self.at: int | None = 0 if start == "none" else None
        """Its first character; None: not known yet."""

    def find(self, text: str) -> int | None:
        """`at`, of the output so far."""
        if self.at is None and self._start == "maybe":
            begin = text.lstrip()
            if len(begin) >= len(BEGIN) or not BEGIN.startswith(begin):
                self._start = "open" if begin.startswith(BEGIN) else "none"
                self.at = None if self._start == "open" else 0
        if self.at is None and self._start == "open":
            end = text.find(END, max(0, self._num_seen - len(END) + 1))
            if end >= 0:
                self._start, self._num_seen = "after", end + len(END)
            else:
                self._num_seen = len(text)
        if self.at is None and self._start == "after":
            rest = text[self._num_seen :].lstrip()
            self.at = len(text) - len(rest) if rest else None
        return self.at
