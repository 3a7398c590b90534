"""From results to answers, streamed or whole, whatever the endpoint: a `Form` says how they look. Knows no sampling."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hocket.errors import HocketError
from hocket.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hocket.server.async_client import Closed, Item, Results
from hocket.server.errors import ApiError, Json, api_error
from hocket.server.protocol import Sampled
from hocket.server.served_model import ServedModel

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Gain:
    """What a completion has more of than when it was last looked at. is_first: it is the first look."""

    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool


class Tail:
    """How much of a completion its reader has."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._num_tokens = 0
        self._is_first = True
        self._is_finished = False

    def gain(self, completion: CompletionOutput, *, wants_tokens: bool = False) -> Gain | None:
        """What is new; None where there is nothing to show: tokens wait for their text, unless they are wanted."""
        text = completion.text[self._num_chars :]
        token_ids = completion.token_ids[self._num_tokens :]
        has_news = bool(text) or completion.finished or (wants_tokens and bool(token_ids))
        if self._is_finished or not has_news:
            return None
        logprobs = None if completion.logprobs is None else completion.logprobs[self._num_tokens :]
        gain = Gain(text, token_ids, logprobs, completion.finish_reason, completion.stop_reason, self._is_first)
        self._num_chars += len(text)
        self._num_tokens += len(token_ids)
        self._is_first, self._is_finished = False, completion.finished
        return gain


@dataclass
class Form(ABC):
    """One request of an endpoint, and how its answer looks. names: the endpoint's names of fields, by ours."""

    served: ServedModel
    body: Sampled
    answer_id: str
    model: str
    rank: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    whole_object = chunk_object = ""

    @abstractmethod
    async def items(self) -> list[Item]:
        """What to ask of the model."""

    @abstractmethod
    def choice(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A finished completion."""

    @abstractmethod
    def chunks(self, position: int, output: RequestOutput, index: int, gain: Gain) -> Iterator[dict[str, Any]]:
        """What a completion gained, each an entry of `choices`."""

    def names(self) -> dict[str, str]:
        """The endpoint's names of fields that it calls otherwise than SamplingParams."""
        return {}

    def is_ready(self, output: RequestOutput) -> bool:
        """Whether its completions may be shown; what may not yet is looked at again when there is more."""
        return True

    def num_output_tokens(self, output: RequestOutput) -> int:
        return sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens, over all prompts and completions so far."""
        outputs = self.outputs.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(self.num_output_tokens(output) for output in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)},
        }

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            self.choice(position, output, completion)
            for position, output in sorted(self.outputs.items())
            for completion in output.outputs
        ]
        return self._envelope(self.whole_object, choices) | {"usage": self.usage()}

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """A part of a stream. Whoever asks for usage at the end finds null in all chunks before, as of OpenAI."""
        options, message = self.body.stream_options, self._envelope(self.chunk_object, [choice])
        if options is not None and options.continuous_usage_stats:
            message["usage"] = self.usage()
        elif options is not None and options.include_usage:
            message["usage"] = None
        return sse(message)

    def last_chunk(self) -> bytes:
        """With the numbers of tokens."""
        return sse(self._envelope(self.chunk_object, []) | {"usage": self.usage()})

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def sse(message: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


async def answer(request: Request, form: Form) -> Response:
    """Run a request to its answer. Raises ApiError where it is refused or fails before anything is streamed."""
    try:
        results = form.served.submit(await form.items(), whole=not form.body.stream)
    except HocketError as error:
        raise api_error(error, names=form.names()) from error
    headers = {"x-request-id": form.answer_id}
    if form.body.stream:
        return EventStream(_events(form, results), results.close, headers)
    async with closed_when_gone(request.receive, results.close):
        async for position, output in results:
            form.outputs[position] = output
    return Json(form.whole(), headers=headers)


async def _events(form: Form, results: Results) -> AsyncGenerator[bytes, None]:
    tails: dict[tuple[int, int], Tail] = {}
    try:
        async for position, output in results:
            form.outputs[position] = output
            for completion in output.outputs if form.is_ready(output) else ():
                tail = tails.setdefault((position, completion.index), Tail())
                gain = tail.gain(completion, wants_tokens=bool(form.body.return_token_ids))
                if gain is not None:
                    for choice in form.chunks(position, output, completion.index, gain):
                        yield form.chunk(choice)
        if form.body.stream_options and form.body.stream_options.include_usage:
            yield form.last_chunk()
    except HocketError as error:  # the status has been sent: an event is all that is left
        yield sse(api_error(error).body)
    yield DONE


@contextlib.asynccontextmanager
async def closed_when_gone(receive: Receive, close: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `close` as soon as the client has gone, and at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        close()


class EventStream(Response):
    """Server-sent events, until they end or the client has gone: then `close` is called and no more is asked for."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(None, headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closed_when_gone(receive, self._close):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(Closed):
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_model(model: str | None, served: Sequence[str]) -> str:
    """The name to answer with. Raises ApiError for one that is not served."""
    if model is not None and model not in served:
        message = f"model: {model!r} is not served here; served: {', '.join(served)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return model or served[0]
