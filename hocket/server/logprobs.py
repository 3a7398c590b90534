"""Log-probabilities as OpenAI's two endpoints show them. Knows nothing of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hocket.errors import HocketError
from hocket.outputs import Logprob, PositionLogprobs
from hocket.tokenizer.detokenizer import token_bytes
from hocket.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0
"""Shown for minus infinity, which JSON cannot hold."""


class LogprobWriter:
    """tokenizer None: tokens have no text, "token_id:N" stands for it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._has_bytes = tokenizer is not None and tokenizer.decoder_types == ["ByteLevel"]

    def of_completion(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offset: int
    ) -> dict[str, Any]:
        """Four lists, by token. positions: None where there is nothing before the token. offset: of the first token's
        text, in characters."""
        written: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            own = None if position is None else position[token_id]
            text = self._text(token_id, own)
            written["tokens"].append(text)
            written["token_logprobs"].append(None if own is None else _finite(own.logprob))
            written["top_logprobs"].append(None if position is None else self._by_text(position))
            written["text_offset"].append(offset)
            offset += len(text)
        return written

    def of_chat(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int
    ) -> dict[str, list[dict[str, Any]]]:
        """One entry per token, with the `num_top` likeliest tokens of its position."""
        entries = []
        for token_id, position in zip(token_ids, positions, strict=True):
            top = [(i, other) for i, other in position.items() if other.rank is not None and other.rank <= num_top]
            top.sort(key=lambda item: item[1].rank or 0)
            entry = self._entry(token_id, position[token_id])
            entries.append(entry | {"top_logprobs": [self._entry(i, other) for i, other in top]})
        return {"content": entries}

    def _entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = self._text(token_id, logprob)
        return {"token": text, "logprob": _finite(logprob.logprob), "bytes": self._bytes(token_id, text)}

    def _bytes(self, token_id: int, text: str) -> list[int]:
        """A token may hold a part of a character, of which its text shows nothing."""
        if self._tokenizer is not None and self._has_bytes:
            return list(token_bytes(self._tokenizer, token_id))
        return list(text.encode())

    def _by_text(self, position: PositionLogprobs) -> dict[str, float]:
        """The likelier one where two tokens have the same text."""
        ordered = sorted(position.items(), key=lambda item: item[1].logprob)
        return {self._text(token_id, logprob): _finite(logprob.logprob) for token_id, logprob in ordered}

    def _text(self, token_id: int, logprob: Logprob | None) -> str:
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode_one(token_id)


def _finite(logprob: float) -> float:
    if math.isnan(logprob):
        raise HocketError("the model gave a log-probability that is not a number")
    return max(logprob, LOWEST)
