"""What a checkpoint says about sampling: generation_config.json. Knows nothing of requests or tokenizers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import ConfigError
from hocket.request import SamplingParams

# The entries that change sampling, and the field of SamplingParams each one sets (the same ones as vLLM takes).
_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """eos_token_ids: ids that end an output. defaults: SamplingParams fields that the checkpoint recommends."""

    eos_token_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> GenerationConfig:
        """Read generation_config.json; an empty one when there is none. Raises ConfigError when it is unreadable."""
        file = Path(directory) / "generation_config.json"
        if not os.path.lexists(file):
            return cls()
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError("generation_config", str(file), f"a readable JSON file ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError("generation_config", str(file), "a JSON object")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationConfig:
        defaults = {name: values[key] for key, name in _FIELDS.items() if values.get(key) is not None}
        SamplingParams(**defaults)  # a wrong value is named when the model is opened, not at the first request
        return cls(eos_token_ids=merge_token_ids(values.get("eos_token_id")), defaults=defaults)

    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return SamplingParams(**self.defaults)


def merge_token_ids(*sources: object) -> tuple[int, ...]:
    """Ids of several sources (None, an id, or ids), without repetition, in order.

    Raises ConfigError for anything else.
    """
    merged: dict[int, None] = {}
    for source in sources:
        ids = source if isinstance(source, (list, tuple)) else [] if source is None else [source]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ConfigError("eos_token_id", source, "a token id or a list of them")
            merged[token_id] = None
    return tuple(merged)
