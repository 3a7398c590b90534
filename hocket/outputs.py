"""Outputs: what a rank reports per step and what a user gets back. Knows nothing of how either is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities at one position: the sampled (or prompt) token first, then the most likely ones, best first.

    token_ids and logprobs have the same length (1 + n; the first token may appear again). rank: 1 + number of tokens
    more likely than the first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class TokenOutput(msgspec.Struct, omit_defaults=True):
    """What one request gained in one step, as sent from a rank to the front.

    token_ids: new ones only. logprobs: one entry per new id, when asked for. prompt_logprobs: sent once, complete,
    [0] is None. queue_s: with the first token, how long the request waited on its rank before it was first scheduled.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0


@dataclass
class Logprob:
    """One token's log-probability, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""token id -> Logprob at one position."""


@dataclass
class CompletionOutput:
    """One completion of a prompt, so far. token_ids keeps the tokens of a stop string that text leaves out."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request on the front's monotonic clock, in seconds; None until it happened."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0


@dataclass
class RequestOutput:
    """A prompt and its completions so far. num_cached_tokens: prompt tokens taken from the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
