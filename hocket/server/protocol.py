"""What requests may say, field by field: OpenAI's, and those of vLLM that change what is sampled. Knows no engine.

Names, defaults and null ("as if it were not there") are theirs. What Hocket cannot do is refused by name; what changes
no answer is taken and ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from hocket.server.errors import ApiError

MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_PROMPTS = 2048
"""Prompts of a request times `n`."""
MAX_MESSAGES = 4096
MAX_TOOLS = 1024

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "ask for `n` completions and choose"),
    "suffix": ((None, ""), "text is only continued"),
    "use_beam_search": ((None, False), "completions are sampled"),
    "structured_outputs": ((None,), "say it as response_format"),
    "guided_json": ((None,), "say it as response_format"),
    "guided_regex": ((None,), "a pattern may stand in a JSON schema: response_format"),
    "guided_choice": ((None,), "an enum may stand in a JSON schema: response_format"),
    "guided_grammar": ((None,), "only JSON schemas are followed: response_format"),
    "tools": ((None, []), "tools are for /v1/chat/completions"),
    "tool_choice": ((None, "none", "auto"), "tools are for /v1/chat/completions"),
    "functions": ((None, []), "the field is tools now"),
    "function_call": ((None, "none", "auto"), "the field is tool_choice now"),
    "modalities": ((None, ["text"]), "only text is generated"),
    "audio": ((None,), "only text is generated"),
    "prediction": ((None,), "nothing is predicted"),
    "web_search_options": ((None,), "nothing is searched"),
    "reasoning_effort": ((None,), "say it in chat_template_kwargs, as the model's template names it"),
    "chat_template": ((None,), "the server has one template (--chat-template)"),
    "truncate_prompt_tokens": ((None,), "prompts are never cut"),
    "logits_processors": ((None, []), "no code of a request is run"),
    "prompt_logprobs": ((None,), "ask for echo and logprobs of /v1/completions"),
    "priority": ((None, 0), "requests are served in the order of their arrival"),
    "length_penalty": ((None, 1, 1.0), "completions are sampled"),
    "early_stopping": ((None, False), "completions are sampled"),
}
"""By field: the values that ask for nothing, and what to do instead."""
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
"""They change no answer."""

Ids = Annotated[list[int], Field(max_length=8192)]
Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        }
    ),
]
"""Text, token ids, or a list of either: checked where they are used, since a list may have a million entries."""


class Body(BaseModel):
    """Of any request: types are as they stand (no text for a number), and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="one of /v1/models; may be left out")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Refuse by name what cannot be done; drop what changes nothing."""
        if not isinstance(data, dict):
            return data
        for name in UNSUPPORTED.keys() & data.keys() - cls.model_fields.keys():
            harmless, instead = UNSUPPORTED[name]
            if data[name] not in harmless:
                raise ApiError(400, f"{name}: not supported here ({instead})", param=name, code="unsupported_parameter")
        dropped = (UNSUPPORTED.keys() | set(IGNORED)) - cls.model_fields.keys()
        return {name: value for name, value in data.items() if name not in dropped}


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="a last chunk with the numbers of tokens")
    continuous_usage_stats: bool | None = Field(None, description="numbers of tokens in every chunk")
    include_obfuscation: bool | None = Field(None, description="taken, without effect")


class JsonSchema(BaseModel):
    """A schema, and what it is called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON schema; none: any object")
    strict: bool | None = Field(None, description="it is always followed strictly")


class ResponseFormat(BaseModel):
    """What an answer must be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        """The JSON schema to follow, as text; None: none."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return json.dumps(schema or {"type": "object"})


class Sampled(Body):
    """How to sample: what `SamplingParams` takes, which checks the values."""

    n: int | None = Field(None, ge=1, le=MAX_COMPLETIONS)
    temperature: float | None = Field(None, description="0 to 10000; 0: greedy", json_schema_extra={"minimum": 0})
    top_p: float | None = Field(None, description="above 0, at most 1")
    top_k: int | None = Field(None, description="0 or -1: all tokens")
    min_p: float | None = Field(None, description="0 to 1")
    presence_penalty: float | None = Field(None, description="-2 to 2")
    frequency_penalty: float | None = Field(None, description="-2 to 2")
    repetition_penalty: float | None = Field(None, description="0.01 to 100")
    seed: int | None = Field(None, description="the same request with the same seed gives the same tokens")
    stop: Annotated[str, Field(min_length=1, max_length=256)] | Words | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = Field(
        None, description="by token id: what is added to its logit, cut to ±100"
    )
    allowed_token_ids: Ids | None = None
    bad_words: Words | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="also give token ids")
    response_format: ResponseFormat | None = Field(None, description="text, any JSON object, or JSON of a schema")

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Sampled:
        given = self.response_format
        if given is not None and (given.type == "json_schema") != (given.json_schema is not None):
            raise ApiError(400, "response_format: json_schema goes with type json_schema", param="response_format")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream true", param="stream_options")
        return self


class CompletionRequest(Sampled):
    """`POST /v1/completions`: continue a prompt."""

    prompt: Prompts = Field(description="text, token ids, or a list of these")
    max_tokens: int | None = Field(None, description="default 16; 0 with echo: the prompt alone")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="so many likeliest tokens at each position")
    echo: bool | None = Field(None, description="the prompt comes before its completion")
    add_special_tokens: bool | None = Field(None, description="such as the model's first token; default true")


_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,256}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
Tools = Annotated[list[Annotated[Any, WithJsonSchema(_FUNCTION)]], Field(max_length=MAX_TOOLS)]
"""The template gets them as they are."""
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _FUNCTION]})]


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`: answer a conversation."""

    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, description="the older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(None, description="default: up to the model's length")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = Field(None, description="default true: the assistant speaks next")
    continue_final_message: bool | None = Field(None, description="go on within the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="for the template, as enable_thinking")
    tools: Tools | None = Field(None, description="functions that the model may ask to have called")
    tool_choice: ToolChoice | None = Field(
        None, description="default auto with tools: the model may call some; required: it must; or a function: that one"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: only the first call of an answer is told")

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens: differs from max_completion_tokens, its newer name: give one of them"
            raise ApiError(400, message, param="max_tokens")
        return self


class TokenizeRequest(Body):
    """`POST /tokenize`: token ids of a text, or of a conversation in the model's template."""

    prompt: str | None = None
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = Field(None, description="also give the text of each token")

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`: text of token ids."""

    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]


class AbortRequest(Body):
    """`POST /abort`: end requests, by the id of their answers."""

    request_id: str | list[str] | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> AbortRequest:
        if (self.request_id is None) == (not self.abort_all):
            raise ApiError(400, "request_id: give either request_id or abort_all", param="request_id")
        return self
