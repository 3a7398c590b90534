"""The cells of a step benchmark: which requests make a rank's steps what is asked for. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.bench.floor import StepShape
from hocket.errors import ConfigError

PHASES = ("decode", "prefill")
SPARE_STEPS = 2
"""Requests reach ranks at slightly different times, and a step counts only behind another of its kind."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Steps of one kind: `num_tokens` tokens on every rank. The counts of requests and tokens are of one rank."""

    phase: str
    num_tokens: int
    num_requests: int
    prompt_len: int
    output_len: int
    context: float
    """decode: mean tokens that a query sees; prefill: tokens of a prompt."""
    num_steps: int
    """As many steps of the kind there are at least."""

    @classmethod
    def decode(cls, num_requests: int, context: int, num_steps: int, batched_tokens: int) -> Cell:
        """Requests that decode together for `num_steps` steps at a mean context of `context`.

        Prompts are computed while earlier requests decode already, for at most so many steps as the prompts fill beside
        all decodes; each request runs that much longer. Over the steps in which all decode the oldest request sees
        prompt_len + output_len - 1 tokens at last and the youngest prompt_len + 1 at first; the mean is half-way.

        Raises:
            ConfigError: no token of a step is left for prompts, or the context is shorter than what is generated.
        """
        if batched_tokens <= num_requests:
            raise ConfigError("max_num_batched_tokens", batched_tokens, f"more than tokens_per_gpu ({num_requests})")
        stagger = -(-num_requests * context // (batched_tokens - num_requests))
        output_len = stagger + num_steps + SPARE_STEPS
        prompt_len = context - output_len // 2
        if prompt_len < 1:
            allowed = f"over {output_len // 2} for {num_requests} requests (or fewer steps, or more batched tokens)"
            raise ConfigError("context", context, allowed)
        return cls(
            phase="decode",
            num_tokens=num_requests,
            num_requests=num_requests,
            prompt_len=prompt_len,
            output_len=output_len,
            context=prompt_len + output_len / 2,
            num_steps=num_steps,
        )

    @classmethod
    def prefill(cls, batched_tokens: int, prompt_len: int, num_steps: int) -> Cell:
        """Prompts of `prompt_len` tokens that fill `num_steps` steps of `batched_tokens`."""
        return cls(
            phase="prefill",
            num_tokens=batched_tokens,
            num_requests=-(-(num_steps + SPARE_STEPS) * batched_tokens // prompt_len),
            prompt_len=prompt_len,
            output_len=1,
            context=prompt_len,
            num_steps=num_steps,
        )

    @property
    def shape(self) -> StepShape:
        if self.phase == "decode":
            return StepShape.decode(self.num_tokens, self.context)
        return StepShape.prefill(self.num_tokens, self.prompt_len)

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_len + self.output_len

    @property
    def num_running(self) -> int:
        """Requests that a step may hold."""
        return self.num_requests if self.phase == "decode" else -(-self.num_tokens // self.prompt_len) + 1


def sweep_of(
    phases: Sequence[str],
    tokens_per_gpu: Sequence[int],
    context: int,
    *,
    num_steps: int,
    num_prefill_steps: int,
    batched_tokens: int,
) -> list[Cell]:
    """The decode cells, one per entry of `tokens_per_gpu`, then the prefill cell, as far as `phases` ask for them."""
    cells = []
    if "decode" in phases:
        cells += [Cell.decode(tokens, context, num_steps, batched_tokens) for tokens in tokens_per_gpu]
    if "prefill" in phases:
        cells.append(Cell.prefill(batched_tokens, context, num_prefill_steps))
    return cells


def whole_numbers(field: str, text: str) -> tuple[int, ...]:
    """`64,128` as numbers; ConfigError for anything else, or one below 1."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(field, text, "whole numbers of at least 1, with commas between them")
    return tuple(int(part) for part in parts)


def names(field: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """`decode,prefill` as names; ConfigError for one that is not `known`."""
    found = tuple(part.strip() for part in text.split(","))
    if not set(found) <= set(known):
        raise ConfigError(field, text, f"of {', '.join(known)}, with commas between them")
    return found
