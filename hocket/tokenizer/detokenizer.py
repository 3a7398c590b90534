"""Ids to text, token by token, with stop strings. Knows nothing of requests in flight or why a rank ended one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from hocket.request import SamplingParams
from hocket.tokenizer.reasoning import ContentStart
from hocket.tokenizer.tokenizer import Tokenizer

_NUM_CONTEXT_TOKENS = 8
"""Prompt tokens looked at before the output: enough for a character of 4 bytes and for a word boundary."""
_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Turns ids into text as they come; text in, never half a character out."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; the rest is kept for the next one."""
        ...

    def flush(self) -> str:
        """Complete characters still kept at the end; an incomplete one is dropped."""
        ...


def open_stream(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream:
    """A stream that continues the prompt. The prompt's own text is not repeated."""
    context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
    if tokenizer.decoder_types == ["ByteLevel"]:
        return ByteStream(tokenizer, context, params.skip_special_tokens)
    keep_together = not params.skip_special_tokens and not params.spaces_between_special_tokens
    return PrefixStream(tokenizer, context, params.skip_special_tokens, keep_special_tokens_together=keep_together)


class ByteStream:
    """For byte-level vocabularies: every token is a string of bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in context:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(token_bytes(self._tokenizer, token_id))

    def flush(self) -> str:
        return ""


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Bytes of a token of a byte-level vocabulary; b"" for an id without a token."""
    text = tokenizer.backend.id_to_token(token_id)
    if text is None:
        return b""
    byte_of = _byte_of_char()
    try:
        return bytes([byte_of[char] for char in text])
    except KeyError:  # an added token, written as itself
        return text.encode()


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable Latin-1 characters are themselves; the other bytes are, in order, the characters from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class PrefixStream:
    """For any other vocabulary: new text is what decoding with a little context gives beyond decoding the context."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        skip_special_tokens: bool,
        *,
        keep_special_tokens_together: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._together_ids = tokenizer.added_token_ids if keep_special_tokens_together else frozenset()
        self._last_was_added = False
        self._has_byte_tokens = "ByteFallback" in tokenizer.decoder_types
        self._has_byte_level = "ByteLevel" in tokenizer.decoder_types
        self._context: list[int] = []
        self._kept: list[int] = []
        for token_id in context:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        is_added = token_id in self._together_ids
        self._kept.append(token_id)
        text = self._new_text()
        if not text or self._is_incomplete(text):
            text = ""
        else:
            self._context, self._kept = self._kept, []
            if is_added and self._last_was_added:
                text = self._tokenizer.backend.id_to_token(token_id) or text
        self._last_was_added = is_added
        return text

    def flush(self) -> str:
        text = self._new_text()
        if self._is_incomplete(text):
            text = text.rstrip(_REPLACEMENT)
        self._context, self._kept = self._kept, []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._kept)
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(self._kept)  # new bytes made the old ones invalid; what was sent stays

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""

    def _is_incomplete(self, text: str) -> bool:
        """Whether the last character lacks bytes, as opposed to a real U+FFFD in the vocabulary."""
        if not text.endswith(_REPLACEMENT):
            return False
        if not self._has_byte_tokens:
            return self._has_byte_level
        run = bytearray()
        for token_id in reversed(self._kept):
            byte = _fallback_byte(self._tokenizer.backend.id_to_token(token_id) or "")
            if byte is None:
                break
            run.insert(0, byte)
        try:
            run.decode()
        except UnicodeDecodeError:
            return True
        return False


def _fallback_byte(token: str) -> int | None:
    """The byte of a token like <0x0A>; None for all others."""
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return int(token[3:5], 16) if is_byte else None


class StopChecker:
    """Watches growing text for stop strings. Where in the text the pieces begin and end makes no difference.

    text: all text so far, cut at the stop string once there is one. stop_string: that string. reasoning: how the text
    begins (REASONING_STARTS): stop strings count only in what follows the reasoning.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False, reasoning: str = "none") -> None:
        self._stop = stop
        self._content = ContentStart(reasoning)
        self._include = include_in_output
        self.text = ""
        self.stop_string: str | None = None

    def append(self, piece: str, *, may_stop: bool = True) -> bool:
        """Add text; True when it completes a stop string: of several, the one complete first, of these the longest.

        may_stop False (min_tokens is not reached): strings completed by this piece do not count, now or later.
        """
        begin = len(self.text)
        self.text += piece
        if not piece or not may_stop or not self._stop:
            return False
        least = self._content.at
        if least is None:
            least = self._content.find(self.text)
            if least is None:
                return False
            begin = least
        found = []
        for stop in self._stop:
            at = self.text.find(stop, max(least, begin - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        if not found:
            return False
        end, at, self.stop_string = min(found)
        self.text = self.text[: end if self._include else at]
        return True

    @property
    def num_held_back(self) -> int:
        """Characters at the end that may turn out to begin a stop string, so must not be shown yet."""
        if self.stop_string is not None or self._include:
            return 0
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Detokenizer:
    """Text of one output: a stream, its stop strings, and the count of tokens.

    num_tokens: tokens used so far; after a stop string, those up to the one that completed it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream = open_stream(tokenizer, prompt_token_ids, params)
        self._checker = StopChecker(
            params.stop_strings, include_in_output=params.include_stop_str_in_output, reasoning=params.reasoning
        )
        self._min_tokens = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output
        self._is_finished = False
        self.num_tokens = 0

    def update(
        self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False, is_last: bool = False
    ) -> str | None:
        """Add output tokens; returns the stop string that ends the output, None when there is none.

        ends_with_stop_token: the last id is EOS or a stop token, whose text is left out unless
        include_stop_str_in_output.
        is_last: no more will come, so text kept back is shown.
        """
        for position, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            if ends_with_stop_token and position == len(token_ids) and not self._shows_stop_token:
                continue
            if self._checker.append(self._stream.step(token_id), may_stop=self.num_tokens > self._min_tokens):
                self._is_finished = True
                return self._checker.stop_string
        if is_last:
            self._is_finished = True
            if self._checker.append(self._stream.flush(), may_stop=self.num_tokens > self._min_tokens):
                return self._checker.stop_string
        return None

    @property
    def text(self) -> str:
        """What may be shown: complete characters, and nothing that may still turn out to belong to a stop string."""
        text = self._checker.text
        if self._is_finished:
            return text
        return text[: len(text) - self._checker.num_held_back]
