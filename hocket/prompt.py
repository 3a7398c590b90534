"""The forms a prompt may come in, made one. Knows nothing of tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import ConfigError

_FORMS = 'text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these'
_KEYS = {"prompt", "prompt_token_ids"}


Prompt = str | dict[str, Any] | list[int]
"""Text, {"prompt": text}, {"prompt_token_ids": ids} (or both: the ids count, the text is only shown), or ids."""


@dataclass(frozen=True)
class ParsedPrompt:
    """Text, token ids, or both."""

    text: str | None = None
    token_ids: list[int] | None = None


def parse_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list. A list of integers is one prompt.

    Raises ConfigError for what cannot be either; each prompt is checked by `parse_prompt`.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ConfigError("prompts", prompts, _FORMS)
    return [list(prompts)] if prompts and isinstance(prompts[0], int) else list(prompts)


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """One prompt in any form. Raises ConfigError for anything else."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        is_valid = set(prompt) <= _KEYS and (text is not None or ids is not None)
        if not is_valid or not isinstance(text, str | None):
            raise ConfigError("prompt", sorted(map(str, prompt)), _FORMS)
        return ParsedPrompt(text=text, token_ids=None if ids is None else _token_ids(ids))
    return ParsedPrompt(token_ids=_token_ids(prompt))


def _token_ids(ids: Any) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
        raise ConfigError("prompt", ids, _FORMS)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ConfigError("prompt_token_ids", token_id, "integers, at least 0")
    return list(ids)
