"""Requests: what a user asks, what a rank is sent, a rank's own record. Knows no tokenizer, tensor or scheduler."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from enum import IntEnum
from typing import Any, Literal

import msgspec

from hocket.errors import ConfigError

SAMPLING_EPS = 1e-5
"""Below this temperature a request is greedy."""
MAX_SEED = 2**63 - 1
MAX_INT = 2**63 - 1
"""Largest integer that can be sent to a rank and held in a tensor there."""
MAX_COMPLETIONS = 16384
MAX_TEMPERATURE = 1e4
MAX_LOGIT_BIAS = 100.0

REASONING_STARTS = ("none", "maybe", "open")
"""How an output may begin: with its content; with reasoning if it says so; with reasoning."""

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to sample one prompt. Names and defaults are vLLM's, so existing scripts keep working.

    After construction every value is a plain Python one (numpy's scalars are taken too), `stop`, `stop_token_ids` and
    `bad_words` are lists, `top_k` is 0 for "all tokens", `logit_bias` lies within ±100, and a greedy request
    (`temperature` < 1e-5) has `top_p`, `top_k` and `min_p` off. `max_tokens=None`: up to the model's length;
    `logprobs=-1` and `prompt_logprobs=-1`: the whole vocabulary. `json_schema`: the output is JSON of that schema, if
    `max_tokens` suffice for it; it wins over whatever else forbids a token (text after construction; needs llguidance).
    `reasoning`: how the output begins; stop strings count only after a reasoning, <think>…</think>: "none", "maybe" (if
    it begins with <think>), "open" (<think> was said).

    Raises ConfigError(field, value, allowed) for every wrong value.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    json_schema: str | dict[str, Any] | None = None
    reasoning: str = "none"

    def __post_init__(self) -> None:
        self._take_numbers()
        self._take_lists()
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ConfigError("n", self.n, "1", where="with temperature 0 (all completions would be the same)")

    def _take_numbers(self) -> None:
        self.n = _int("n", self.n, 1, MAX_COMPLETIONS)
        self.presence_penalty = _float("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = _float("frequency_penalty", self.frequency_penalty, -2, 2)
        # Beyond these bounds a logit times or divided by it may leave fp32's range.
        self.repetition_penalty = _float("repetition_penalty", self.repetition_penalty, 0.01, 100)
        self.temperature = _float("temperature", self.temperature, 0, MAX_TEMPERATURE)
        self.top_p = _float("top_p", self.top_p, 0, 1, above_low=True)
        self.min_p = _float("min_p", self.min_p, 0, 1)
        self.top_k = max(0, _int("top_k", self.top_k, -1))
        self.min_tokens = _int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            self.max_tokens = _int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ConfigError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            seed = _int("seed", self.seed, -(2**63), MAX_SEED)
            self.seed = None if seed == -1 else seed  # -1: "no seed", as in vLLM
        self.logprobs = None if self.logprobs is None else _int("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _int("prompt_logprobs", self.prompt_logprobs, -1)
        for field in _FLAGS:
            setattr(self, field, _flag(field, getattr(self, field)))

    def _take_lists(self) -> None:
        if self.reasoning not in REASONING_STARTS:
            raise ConfigError("reasoning", self.reasoning, " or ".join(REASONING_STARTS))
        self.stop = _strings("stop", self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        if self.stop and not self.detokenize:
            raise ConfigError("stop", self.stop, "None", where="with detokenize False")
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids or [])
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ConfigError("allowed_token_ids", self.allowed_token_ids, "None or at least one token id")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ConfigError("logit_bias", self.logit_bias, "a dict of token id to number")
            values = [_float("logit_bias", value, -math.inf) for value in self.logit_bias.values()]
            # As vLLM does. Any larger one and the result might not be finite.
            bounded = [min(max(value, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for value in values]
            self.logit_bias = dict(zip(_ids("logit_bias", list(self.logit_bias)), bounded, strict=True))

        if self.json_schema is not None:
            self.json_schema = _schema(self.json_schema)
            if self.ignore_eos:
                raise ConfigError("ignore_eos", True, "False", where="with json_schema, after which nothing may come")

    def clone(self) -> SamplingParams:
        """A checked copy that shares nothing with this one: raises ConfigError if a field was set to a wrong value."""
        return msgspec.structs.replace(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, typed as one."""
        return self.stop if isinstance(self.stop, list) else []


class EngineRequest(msgspec.Struct):
    """One sequence to generate, as sent from the front to a rank: `params.n` is 1, nothing needs a tokenizer any more.

    eos_token_ids: ids that end the sequence (empty with ignore_eos). bad_words_ids: token sequences that must not
    appear. max_tokens: resolved, at least 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    bad_words_ids: list[list[int]] = []
    max_tokens: int = 16


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Request:
    """A rank's mutable record of one EngineRequest; the scheduler, the cache and the sampler share it.

    token_ids: prompt then output. num_computed_tokens: tokens whose cache entries exist or are scheduled.
    num_cached_tokens: of these, taken from the prefix cache when the request was first scheduled.
    seed: params.seed, or a value derived from request_id when there is none, so that every rank agrees.
    follower: what follows params.json_schema (hocket.tokenizer.grammar.Follower), where there is one.
    queued_at, admitted_at: when it came and when it was first scheduled, time.perf_counter; 0: not yet.
    """

    __slots__ = (
        "admitted_at",
        "bad_words_ids",
        "block_hashes",
        "block_ids",
        "eos_token_ids",
        "finish_reason",
        "follower",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "prompt_token_ids",
        "queued_at",
        "request_id",
        "seed",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, engine_request: EngineRequest) -> None:
        self.request_id: str = engine_request.request_id
        self.params: SamplingParams = engine_request.params
        self.prompt_token_ids: list[int] = engine_request.prompt_token_ids
        self.token_ids: list[int] = list(engine_request.prompt_token_ids)
        self.num_prompt_tokens: int = len(engine_request.prompt_token_ids)
        self.num_computed_tokens: int = 0
        self.num_cached_tokens: int = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.eos_token_ids: list[int] = engine_request.eos_token_ids
        self.bad_words_ids: list[list[int]] = engine_request.bad_words_ids
        self.max_tokens: int = engine_request.max_tokens
        self.status: RequestStatus = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.seed: int = _resolve_seed(engine_request)
        self.num_preemptions: int = 0
        self.follower: Any = None
        self.queued_at = self.admitted_at = 0.0

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated ids."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether more is to be computed than the one token of a decode: prompt, or output after a preemption."""
        return self.num_computed_tokens < max(self.num_prompt_tokens, self.num_tokens - 1)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


def _resolve_seed(engine_request: EngineRequest) -> int:
    if engine_request.params.seed is not None:
        return engine_request.params.seed & MAX_SEED
    digest = hashlib.blake2b(engine_request.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _int(field: str, value: object, low: int, high: int = MAX_INT) -> int:
    allowed = f"an integer, at least {low}" if high == MAX_INT else f"an integer from {low} to {high}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ConfigError(field, value, allowed)
    number = int(value)
    if number > high == MAX_INT:
        raise ConfigError(field, value, f"{allowed}, below 2**63")
    if not low <= number <= high:
        raise ConfigError(field, value, allowed)
    return number


def _float(field: str, value: object, low: float, high: float = math.inf, above_low: bool = False) -> float:
    if math.isinf(low):
        allowed = "finite numbers"
    else:
        allowed = f"above {low:g}, at most {high:g}" if above_low else f"{low:g} to {high:g}"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ConfigError(field, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # NaN fails every comparison; infinity is refused by name.
    if not low <= number <= high or math.isinf(number) or (above_low and number == low):
        raise ConfigError(field, value, allowed)
    return number


def _flag(field: str, value: object) -> bool:
    # numpy's booleans are no numbers; they are known by name, since nothing here needs numpy.
    if not (isinstance(value, numbers.Integral) or type(value).__name__ in ("bool", "bool_")) or value not in (0, 1):
        raise ConfigError(field, value, "True or False")
    return bool(value)


def _strings(field: str, given: object) -> list[str]:
    """None, one string or several → a list of plain, encodable ones."""
    items = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(items, (list, tuple)) or any(not isinstance(item, str) or not item for item in items):
        raise ConfigError(field, given, "non-empty strings")
    try:
        return [item.encode().decode() for item in items]
    except UnicodeEncodeError:
        raise ConfigError(field, given, "valid Unicode text") from None


def _schema(given: object) -> str:
    """A JSON schema as text."""
    if isinstance(given, str):
        return given
    try:
        if isinstance(given, dict):
            return json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConfigError("json_schema", given, "a JSON schema, as a dict or as text")


def _ids(field: str, given: object) -> list[int]:
    allowed = "token ids (integers, at least 0)"
    if not isinstance(given, (list, tuple)):
        raise ConfigError(field, given, allowed)
    ids = [int(i) if isinstance(i, numbers.Integral) and not isinstance(i, bool) else -1 for i in given]
    if any(not 0 <= i <= MAX_INT for i in ids):
        raise ConfigError(field, given, allowed)
    return ids
