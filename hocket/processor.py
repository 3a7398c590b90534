"""The front's translations: prompts to EngineRequests, TokenOutputs to RequestOutputs. Knows nothing of ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from hocket.errors import CapacityError, ConfigError
from hocket.generation_config import GenerationConfig, merge_token_ids
from hocket.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    TokenOutput,
)
from hocket.prompt import ParsedPrompt, Prompt, parse_prompt
from hocket.request import MAX_SEED, EngineRequest, SamplingParams
from hocket.tokenizer.detokenizer import Detokenizer
from hocket.tokenizer.grammar import Grammars
from hocket.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Entry:
    """A user's request: its output, and how many of its completions go on."""

    output: RequestOutput
    num_unfinished: int


@dataclass(slots=True)
class _Child:
    """One completion: the engine request `engine_id`, and what its tokens have become."""

    engine_id: str
    entry: _Entry
    completion: CompletionOutput
    params: SamplingParams
    detokenizer: Detokenizer | None


class Processor:
    """Keeps the requests in flight. Not thread-safe; one per front.

    tokenizer None (skip_tokenizer_init): prompts and outputs are token ids, every text is "".
    vocab_size: of the model; ids at or above it are refused. max_model_len: most tokens of prompt and output.
    eos_token_ids: config.json's; those of generation_config.json and of the tokenizer count as well.
    seed: gives seeds to requests without one, so that runs repeat (None: they differ). clock: seconds, for metrics.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.grammars = None if tokenizer is None else Grammars(tokenizer, vocab_size)
        self.generation_config = generation_config or GenerationConfig()
        of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
        self.eos_token_ids = merge_token_ids(self.generation_config.eos_token_ids, tuple(eos_token_ids), of_tokenizer)
        self._random = random.Random(seed)
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._children: dict[str, _Child] = {}
        self._aborts: list[str] = []

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> list[EngineRequest]:
        """Admit a prompt (its forms: hocket.prompt); returns what to send to ranks: params.n requests.

        With n = 1 the engine request has the id itself, otherwise INDEX_ID. params None: the checkpoint's defaults.
        Nothing is kept when it raises.

        Raises:
            ConfigError: the prompt or a parameter is wrong, or the id is in use.
            CapacityError: the prompt leaves no room for a token of output.
        """
        arrival_time = self._clock()
        params = self._params(params)
        engine_ids = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        if request_id in self._entries or any(engine_id in self._children for engine_id in engine_ids):
            raise ConfigError("request_id", request_id, "an id that is not in use")
        text, token_ids = self._tokenize(parse_prompt(prompt))
        requests = self._engine_requests(engine_ids, token_ids, params)
        output = RequestOutput(request_id, text, token_ids, metrics=RequestMetrics(arrival_time=arrival_time))
        entry = self._entries[request_id] = _Entry(output, params.n)
        for index, request in enumerate(requests):
            completion = CompletionOutput(index, "", [], None if params.logprobs is None else 0.0)
            completion.logprobs = None if params.logprobs is None else []
            output.outputs.append(completion)
            child = _Child(request.request_id, entry, completion, params, self._detokenizer(token_ids, params))
            self._children[request.request_id] = child
        return requests

    def _params(self, given: object) -> SamplingParams:
        """A checked copy: the caller may change theirs at any time, and may have set a field to anything."""
        if given is None:
            return self.generation_config.sampling_params()
        if not isinstance(given, SamplingParams):
            raise ConfigError("sampling_params", given, "SamplingParams(…), or None for the model's own")
        return given.clone()

    def process(self, output: TokenOutput) -> RequestOutput | None:
        """Take what one engine request gained; returns the user's request so far, None when it is not in flight.

        It is the same object each time, updated in place, with all n completions in order: copy what must not change.
        Ask `take_aborts` afterwards.
        """
        child = self._children.get(output.request_id)
        if child is None:
            return None
        entry = child.entry
        self._take_prompt_facts(entry.output, output, child.params)
        num_new = self._take_tokens(child, output)
        self._take_times(entry.output, num_new)
        if child.completion.finish_reason is not None:
            self._end(child)
        return entry.output

    def output_of(self, request_id: str) -> RequestOutput | None:
        """A user's request so far; None when it is not in flight."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.output

    def take_aborts(self) -> list[str]:
        """Engine requests that stop strings ended since the last call: the ranks must be told."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def abort(self, request_id: str) -> list[str]:
        """Give up a user's request: its open completions end with 'abort'. Returns the engine requests to abort."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        children = [child for child in self._children.values() if child.entry is entry]
        for child in children:
            child.completion.finish_reason = "abort"
            self._end(child)
        return [child.engine_id for child in children]

    def drop(self, engine_id: str) -> RequestOutput | None:
        """An engine request ended without a result: its completion finishes with the reason 'error'. Returns the user's
        request, None when it is not in flight."""
        child = self._children.get(engine_id)
        if child is None:
            return None
        child.completion.finish_reason = "error"
        self._end(child)
        return child.entry.output

    @property
    def num_unfinished(self) -> int:
        """User requests in flight."""
        return len(self._entries)

    def _tokenize(self, prompt: ParsedPrompt) -> tuple[str | None, list[int]]:
        token_ids = prompt.token_ids
        if token_ids is None:
            if self.tokenizer is None:
                raise ConfigError("prompt", prompt.text, "token ids", where="with skip_tokenizer_init")
            token_ids = self.tokenizer.encode(prompt.text or "")
        if not token_ids:
            raise ConfigError("prompt", prompt.text if prompt.token_ids is None else [], "at least one token")
        self._check_ids("prompt_token_ids", token_ids)
        self.check_length(token_ids)
        return prompt.text, token_ids

    def check(self, prompt: Prompt) -> None:
        """Raise what `add` would raise for the prompt."""
        self._tokenize(parse_prompt(prompt))

    def check_length(self, token_ids: Sequence[int]) -> None:
        """Raise CapacityError for a prompt that leaves no room for a token of output."""
        if len(token_ids) >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {len(token_ids)} tokens; with one token of output at most "
                f"{self.max_model_len - 1} fit (max_model_len {self.max_model_len})"
            )

    def _engine_requests(
        self, engine_ids: list[str], token_ids: list[int], params: SamplingParams
    ) -> list[EngineRequest]:
        self._check_params(params)
        room = self.max_model_len - len(token_ids)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        eos_token_ids = [] if params.ignore_eos else list(self.eos_token_ids)
        bad_words_ids = self._bad_words_ids(params)
        requests = []
        for index, engine_id in enumerate(engine_ids):
            # One child is enough to report on the prompt they share.
            prompt_logprobs = params.prompt_logprobs if index == 0 else None
            child = msgspec.structs.replace(
                params, n=1, seed=(seed + index) & MAX_SEED, prompt_logprobs=prompt_logprobs
            )
            requests.append(
                EngineRequest(
                    request_id=engine_id,
                    prompt_token_ids=token_ids,
                    params=child,
                    eos_token_ids=eos_token_ids,
                    bad_words_ids=bad_words_ids,
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                )
            )
        return requests

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        if self.tokenizer is None:
            for field in ("stop", "bad_words", "json_schema"):
                if getattr(params, field):
                    raise ConfigError(field, getattr(params, field), "None", where="with skip_tokenizer_init")
        elif isinstance(params.json_schema, str):
            self.check_schema(params.json_schema)

    def check_schema(self, schema: str) -> None:
        """Raise ConfigError for a JSON schema that no output can follow. Takes up to 0.3 s the first time for each
        schema, and may be called on any thread."""
        assert self.grammars is not None
        self.grammars.check(schema, self.eos_token_ids)

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self.vocab_size:
            raise ConfigError(field, largest, f"token ids below {self.vocab_size}, the model's vocabulary")

    def _bad_words_ids(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is tokenized at the beginning and after a space."""
        words: list[list[int]] = []
        for word in params.bad_words or ():
            assert self.tokenizer is not None
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            words.append(bare)
            if spaced[-len(bare) :] != bare:  # otherwise the bare form covers it
                words.append(spaced)
        return [ids for ids in words if ids]

    def _detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(self.tokenizer, prompt_token_ids, params)

    def _take_prompt_facts(self, request: RequestOutput, output: TokenOutput, params: SamplingParams) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = [
                None if position is None else self._logprobs(position, params) for position in output.prompt_logprobs
            ]

    def _take_tokens(self, child: _Child, output: TokenOutput) -> int:
        """Text, ids, log-probabilities and reason to finish; returns the number of tokens taken."""
        completion = child.completion
        num_new, stop_string = len(output.token_ids), None
        if child.detokenizer is not None:
            before = child.detokenizer.num_tokens
            stop_string = child.detokenizer.update(
                output.token_ids,
                ends_with_stop_token=output.finish_reason == "stop",
                is_last=output.finish_reason is not None,
            )
            num_new = child.detokenizer.num_tokens - before
            completion.text = child.detokenizer.text
        completion.token_ids += output.token_ids[:num_new]
        if completion.logprobs is not None:
            for position in (output.logprobs or ())[:num_new]:
                completion.logprobs.append(self._logprobs(position, child.params))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + position.logprobs[0]
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        if stop_string is not None:
            completion.finish_reason, completion.stop_reason = "stop", stop_string
            if output.finish_reason is None:
                self._aborts.append(child.engine_id)
        return num_new

    def _logprobs(self, position: TokenLogprobs, params: SamplingParams) -> PositionLogprobs:
        """The position's own token first, with its rank, then the likeliest ones, ranked 1, 2, …"""
        decode = self.tokenizer.decode_one if self.tokenizer is not None and params.detokenize else None
        result: PositionLogprobs = {}
        ranks = (position.rank, *range(1, len(position.token_ids)))
        for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
            if token_id not in result:
                result[token_id] = Logprob(logprob, rank, None if decode is None else decode(token_id))
        return result

    def _take_times(self, request: RequestOutput, num_new: int) -> None:
        metrics = request.metrics
        if metrics is None or not num_new:
            return
        metrics.last_token_time = self._clock()
        metrics.first_token_time = metrics.first_token_time or metrics.last_token_time
        metrics.num_generated_tokens += num_new

    def _end(self, child: _Child) -> None:
        """Forget a finished completion, and the request when it was the last one."""
        del self._children[child.engine_id]
        entry = child.entry
        entry.num_unfinished -= 1
        if entry.num_unfinished == 0:
            entry.output.finished = True
            if entry.output.metrics is not None:
                entry.output.metrics.finished_time = self._clock()
            del self._entries[entry.output.request_id]
