"""`/v1/chat/completions`: a conversation to go on with, and how the answer looks. Knows nothing of how results come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hocket.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hocket.server.answers import Form, Gain
from hocket.server.async_client import Item
from hocket.server.errors import ApiError
from hocket.server.logprobs import LogprobWriter
from hocket.server.parts import AnswerParts, Part, call_chunks, whole_calls
from hocket.server.protocol import ChatRequest, TokenizeRequest
from hocket.server.sampling import sampling_params, schema_of
from hocket.server.served_model import ServedModel
from hocket.server.tools import tool_use
from hocket.tokenizer.reasoning import reasoning_start

_OURS = ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""What the template gets from the request's own fields, or not at all."""


async def render(served: ServedModel, body: ChatRequest | TokenizeRequest, tools: list[Any] | None) -> str:
    """The prompt of a conversation. Raises ApiError, ConfigError where messages or template do not fit."""
    assert body.messages is not None
    for at, message in enumerate(body.messages):
        _check(f"messages[{at}]", message)
    messages = [_with_reasoning(message) for message in body.messages]
    variables = body.chat_template_kwargs or {}
    for name in _OURS:
        if name in variables:
            raise ApiError(400, f"chat_template_kwargs: {name} is a field of the request", param="chat_template_kwargs")
    goes_on = bool(body.continue_final_message)
    starts = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return await served.render(
        messages, tools=tools, add_generation_prompt=starts, continue_final_message=goes_on, **variables
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates know the reasoning of an earlier answer by its older name."""
    if "reasoning" in message and "reasoning_content" not in message:
        return message | {"reasoning_content": message["reasoning"]}
    return message


def _check(where: str, message: Any) -> None:
    """That it is a message of text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f'{where}: an object with "role" and "content" is needed', param=where)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        where += ".tool_calls"
        shape = '{"type": "function", "function": {"name": …, "arguments": …}}'
        raise ApiError(400, f"{where}: a list of {shape} is needed", param=where)
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return
    where += ".content"
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: text, or a list of parts of text, is needed", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400, f'{where}: only parts of text are supported: {{"type": "text", "text": …}}', param=where
            )


def _is_call(given: Any) -> bool:
    function = given.get("function") if isinstance(given, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


@dataclass(kw_only=True)
class ChatForm(Form):
    """A chat request. reasoning_parser, tool_parser: names, of what tells parts of an answer apart."""

    body: ChatRequest
    reasoning_parser: str | None = None
    tool_parser: str | None = None

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __post_init__(self) -> None:
        self._writer = LogprobWriter(self.served.tokenizer)
        self._use = tool_use(self.body, self.tool_parser)
        self._start = "none"
        self._parts: dict[int, AnswerParts] = {}

    def names(self) -> dict[str, str]:
        asked = "max_completion_tokens" if self.body.max_completion_tokens is not None else "max_tokens"
        schema = "response_format" if self._use.schema is None else "tools"
        renamed = {"prompt": "messages", "logprobs": "top_logprobs", "json_schema": schema}
        return renamed | {"max_tokens": asked}

    async def items(self) -> list[Item]:
        body, model = self.body, self.served.llm.client.processor.generation_config
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        given: dict[str, Any] = {"json_schema": await schema_of(body, self.served, self._use.schema)}
        if limit is not None or "max_tokens" not in model.defaults:
            given["max_tokens"] = limit
        if body.logprobs:
            given["logprobs"] = body.top_logprobs or 0
        if body.skip_special_tokens is None and self._has_special_marks():
            given["skip_special_tokens"] = False
        text = await render(self.served, body, self._use.tools)
        if self.reasoning_parser is not None and given["json_schema"] is None:
            self._start = reasoning_start(self.reasoning_parser, text, continued=_continued(body))
        params = sampling_params(body, model, detokenize=True, reasoning=self._start, **given)
        ids = await self.served.encode(text, add_special_tokens=False)
        return [(self.answer_id, {"prompt": text, "prompt_token_ids": ids}, params, self.rank)]

    def _has_special_marks(self) -> bool:
        """Whether marks of calls would be left out of the text."""
        tokenizer = self.served.need_tokenizer()
        return any(tokenizer.id_of(mark) in tokenizer.special_ids for mark in self._use.marks)

    def choice(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(completion.index, completion.token_ids, completion.logprobs)
        part = self._part(completion.index, completion.text, is_last=True)
        said = part.content or (None if part.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if self.reasoning_parser is not None:
            message |= _reasoning(part.reasoning or None)
        if calls := whole_calls(part.calls):
            message["tool_calls"] = calls
        ending = self._ending(completion.index, completion.finish_reason, completion.stop_reason)
        return choice | {"message": message} | ending | self._ids(completion.token_ids, output.prompt_token_ids)

    def chunks(self, position: int, output: RequestOutput, index: int, gain: Gain) -> Iterator[dict[str, Any]]:
        if gain.is_first:
            yield self._choice(index, [], None) | {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        part = self._part(index, gain.text, is_last=gain.finish_reason is not None)
        delta: dict[str, Any] = {"content": part.content} if part.content else {}
        if part.reasoning:
            delta |= _reasoning(part.reasoning)
        if part.calls:
            delta["tool_calls"] = call_chunks(part.calls)
        choice = self._choice(index, gain.token_ids, gain.logprobs)
        if delta or gain.finish_reason or choice["logprobs"] or self.body.return_token_ids:
            ending = self._ending(index, gain.finish_reason, gain.stop_reason)
            prompt_token_ids = output.prompt_token_ids if gain.is_first else None
            yield choice | {"delta": delta} | ending | self._ids(gain.token_ids, prompt_token_ids)

    def _part(self, index: int, text: str, *, is_last: bool) -> Part:
        """What a piece of a completion brings that is told."""
        if index not in self._parts:
            self._parts[index] = AnswerParts(self._start, self._use.finder and self._use.finder())
        part = self._parts[index].feed(text, is_last=is_last)
        if self.body.parallel_tool_calls is False:
            part = replace(part, calls=[call for call in part.calls if call.index == 0])
        return part

    def _ending(self, index: int, finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
        if finish_reason == "stop" and self._parts[index].num_calls and not self._use.is_named:
            finish_reason = "tool_calls"
        return {"finish_reason": finish_reason, "stop_reason": stop_reason}

    def _choice(self, index: int, token_ids: list[int], logprobs: list[PositionLogprobs] | None) -> dict[str, Any]:
        written = None
        if logprobs is not None and self.body.logprobs:
            written = self._writer.of_chat(token_ids, logprobs, self.body.top_logprobs or 0)
        return {"index": index, "logprobs": written}

    def _ids(self, token_ids: list[int], prompt_token_ids: list[int] | None) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        own = {"token_ids": token_ids}
        return own if prompt_token_ids is None else own | {"prompt_token_ids": prompt_token_ids}


def _continued(body: ChatRequest) -> str | None:
    """The text that the answer goes on with."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _reasoning(text: str | None) -> dict[str, str | None]:
    """By its name, and by the older one that clients still read."""
    return {"reasoning": text, "reasoning_content": text}
