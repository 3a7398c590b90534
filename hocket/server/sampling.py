"""From a request's fields to `SamplingParams`, which checks them. Knows no endpoint."""

from __future__ import annotations

from typing import Any

from hocket.generation_config import GenerationConfig
from hocket.request import SamplingParams
from hocket.server.errors import ApiError
from hocket.server.protocol import Sampled
from hocket.server.served_model import ServedModel

_FORMAT = "response_format"
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


async def schema_of(body: Sampled, served: ServedModel, schema: str | None = None) -> str | None:
    """The JSON schema to follow, which has been tried on a thread. Raises ConfigError for one that cannot be.

    schema: instead of the one that response_format says.
    """
    try:
        if schema is None and body.response_format is not None:
            schema = body.response_format.schema_text()
    except RecursionError:
        raise ApiError(400, "response_format: a schema of so many levels cannot be followed", param=_FORMAT) from None
    if schema is not None:
        served.need_tokenizer()
        await served.check_schema(schema)
    return schema


def sampling_params(body: Sampled, model: GenerationConfig, *, detokenize: bool, **given: Any) -> SamplingParams:
    """What the request asks for, else what the model's generation_config.json does. given: what the endpoint adds.

    Raises:
        ConfigError, ApiError: a value is wrong; the field is named.
    """
    asked = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    bias = None if body.logit_bias is None else _by_id(body.logit_bias)
    return SamplingParams(**(dict(model.defaults) | asked | given), logit_bias=bias, detokenize=detokenize)


def _by_id(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are text."""
    wrong = next((key for key in bias if not (key.isascii() and key.isdecimal() and len(key) < 12)), None)
    if wrong is not None:
        raise ApiError(400, f"logit_bias: the keys are token ids, not {wrong[:40]!r}", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
