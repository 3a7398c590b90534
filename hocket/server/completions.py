"""`/v1/completions`: prompts to continue, and how the answer looks. Knows nothing of how results come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hocket.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hocket.prompt import parse_prompt
from hocket.request import SamplingParams
from hocket.server.answers import Form, Gain
from hocket.server.async_client import Item
from hocket.server.errors import ApiError
from hocket.server.logprobs import LogprobWriter
from hocket.server.protocol import MAX_PROMPTS, CompletionRequest
from hocket.server.sampling import sampling_params, schema_of

DEFAULT_MAX_TOKENS = 16


@dataclass
class CompletionForm(Form):
    """A completion request."""

    body: CompletionRequest

    whole_object = chunk_object = "text_completion"

    def __post_init__(self) -> None:
        self._writer = LogprobWriter(self.served.tokenizer)
        self._offsets: dict[tuple[int, int], int] = {}
        self._is_prompt_only = bool(self.body.echo) and self.body.max_tokens == 0

    def names(self) -> dict[str, str]:
        return {"json_schema": "response_format", "prompt_token_ids": "prompt"}

    async def items(self) -> list[Item]:
        prompts = _prompts(self.body.prompt)
        if len(prompts) * (self.body.n or 1) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: at most {MAX_PROMPTS} completions, over all prompts", param="prompt")
        params = self._params(await schema_of(self.body, self.served))
        return [
            (f"{self.answer_id}-{i}" if i else self.answer_id, await self._tokenised(prompt), params, self.rank)
            for i, prompt in enumerate(prompts)
        ]

    def _params(self, json_schema: str | None) -> SamplingParams:
        body, model = self.body, self.served.llm.client.processor.generation_config
        given: dict[str, Any] = {"json_schema": json_schema}
        if self._is_prompt_only:
            given["max_tokens"] = 1
        elif body.max_tokens is not None or "max_tokens" not in model.defaults:
            given["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.logprobs is not None:
            given |= {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
        return sampling_params(body, model, detokenize=self.served.tokenizer is not None, **given)

    async def _tokenised(self, prompt: str | list[int]) -> dict[str, Any]:
        if isinstance(prompt, str):
            special = self.body.add_special_tokens is not False
            ids = await self.served.encode(prompt, add_special_tokens=special)
            return {"prompt": prompt, "prompt_token_ids": ids}
        self.served.llm.client.processor.check_length(prompt)  # before every token is looked at, on the loop
        text = None
        if self.body.echo and self.served.tokenizer is not None:
            parse_prompt(prompt)
            limit = self.served.llm.client.processor.vocab_size
            text = await self.served.decode([i for i in prompt if i < limit])
        return {"prompt_token_ids": prompt} | ({} if text is None else {"prompt": text})

    def is_ready(self, output: RequestOutput) -> bool:
        """One of n completions brings what is said of the prompt, and begins them all: others may come before it."""
        needs_prompt = self.body.echo and self.body.logprobs is not None
        return not needs_prompt or output.prompt_logprobs is not None or output.finished

    def num_output_tokens(self, output: RequestOutput) -> int:
        return 0 if self._is_prompt_only else super().num_output_tokens(output)

    def choice(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        gain = Gain(
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.stop_reason,
            True,
        )
        return next(self.chunks(position, output, completion.index, gain))

    def chunks(self, position: int, output: RequestOutput, index: int, gain: Gain) -> Iterator[dict[str, Any]]:
        text, token_ids = gain.text, gain.token_ids
        logprobs: list[PositionLogprobs | None] = list(gain.logprobs or ())
        if self._is_prompt_only:
            text, token_ids, logprobs = "", [], []
        if self.body.echo and gain.is_first:
            text = (output.prompt or "") + text
            token_ids = output.prompt_token_ids + token_ids
            if self.body.logprobs is not None:  # one that was aborted before its first token has none
                logprobs = list(output.prompt_logprobs or [None] * len(output.prompt_token_ids)) + logprobs
        choice: dict[str, Any] = {
            "index": position * (self.body.n or 1) + index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._is_prompt_only and gain.finish_reason else gain.finish_reason,
            "stop_reason": gain.stop_reason,
        }
        if self.body.logprobs is not None:
            offset = self._offsets.get((position, index), 0)
            choice["logprobs"] = self._writer.of_completion(token_ids, logprobs, offset)
            self._offsets[position, index] = offset + sum(map(len, choice["logprobs"]["tokens"]))
        if self.body.return_token_ids:
            choice["token_ids"] = gain.token_ids
            if gain.is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        yield choice


def _prompts(given: Any) -> list[str | list[int]]:
    """One prompt or several, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if isinstance(given[0], int):
            return [given]
        if all(isinstance(prompt, (str, list)) for prompt in given):
            return given
    raise ApiError(400, "prompt: text, token ids, or a list of these, not empty", param="prompt")
