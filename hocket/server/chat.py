"""`/v1/chat/completions`: a conversation to go on with, and how the answer looks. Knows nothing of how results come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hocket.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hocket.server.answers import Form, Gain
from hocket.server.async_client import Item
from hocket.server.engine import Engine
from hocket.server.errors import ApiError
from hocket.server.logprobs import LogprobWriter
from hocket.server.protocol import ChatRequest, TokenizeRequest
from hocket.server.sampling import sampling_params, schema_of

_OURS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""What the template gets from the request's own fields."""


async def render(engine: Engine, body: ChatRequest | TokenizeRequest) -> str:
    """The prompt of a conversation. Raises ApiError, ConfigError where messages or template do not fit."""
    assert body.messages is not None
    for at, message in enumerate(body.messages):
        _check(f"messages[{at}]", message)
    variables = body.chat_template_kwargs or {}
    for name in _OURS:
        if name in variables:
            raise ApiError(400, f"chat_template_kwargs: {name} is a field of the request", param="chat_template_kwargs")
    goes_on = bool(body.continue_final_message)
    starts = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return await engine.render(body.messages, add_generation_prompt=starts, continue_final_message=goes_on, **variables)


def _check(where: str, message: Any) -> None:
    """That it is a message of text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f'{where}: an object with "role" and "content" is needed', param=where)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    where += ".content"
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: text, or a list of parts of text, is needed", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400, f'{where}: only parts of text are supported: {{"type": "text", "text": …}}', param=where
            )


@dataclass
class ChatForm(Form):
    """A chat request."""

    body: ChatRequest

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __post_init__(self) -> None:
        self._writer = LogprobWriter(self.engine.tokenizer)

    def names(self) -> dict[str, str]:
        asked = "max_completion_tokens" if self.body.max_completion_tokens is not None else "max_tokens"
        renamed = {"prompt": "messages", "logprobs": "top_logprobs", "json_schema": "response_format"}
        return renamed | {"max_tokens": asked}

    async def items(self) -> list[Item]:
        body, model = self.body, self.engine.llm.client.processor.generation_config
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        given: dict[str, Any] = {"json_schema": await schema_of(body, self.engine)}
        if limit is not None or "max_tokens" not in model.defaults:
            given["max_tokens"] = limit
        if body.logprobs:
            given["logprobs"] = body.top_logprobs or 0
        params = sampling_params(body, model, detokenize=True, **given)
        text = await render(self.engine, body)
        ids = await self.engine.encode(text, add_special_tokens=False)
        return [(self.answer_id, {"prompt": text, "prompt_token_ids": ids}, params, self.rank)]

    def choice(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(completion.index, completion.token_ids, completion.logprobs)
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        ending = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        return choice | {"message": message} | ending | self._ids(completion.token_ids, output)

    def chunks(self, position: int, output: RequestOutput, index: int, gain: Gain) -> Iterator[dict[str, Any]]:
        if gain.is_first:
            yield self._choice(index, [], None) | {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        choice = self._choice(index, gain.token_ids, gain.logprobs) | {
            "delta": {"content": gain.text} if gain.text else {}
        }
        ending = {"finish_reason": gain.finish_reason, "stop_reason": gain.stop_reason}
        yield choice | ending | self._ids(gain.token_ids, output)

    def _choice(self, index: int, token_ids: list[int], logprobs: list[PositionLogprobs] | None) -> dict[str, Any]:
        written = None
        if logprobs is not None and self.body.logprobs:
            written = self._writer.of_chat(token_ids, logprobs, self.body.top_logprobs or 0)
        return {"index": index, "logprobs": written}

    def _ids(self, token_ids: list[int], output: RequestOutput) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": token_ids, "prompt_token_ids": output.prompt_token_ids}
