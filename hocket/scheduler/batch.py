"""What one step computes: a frozen list of (request, range of tokens). Knows no queues, budgets or tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hocket.request import Request

Phase = Literal["idle", "prefill", "decode", "mixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: tokens `start` … `start + num_tokens - 1`.

    block_ids: the request's block table when it was scheduled. Use it, not `request.block_ids`: that one is emptied
    when the request ends or is preempted, which may be before this step runs (the list may have grown, never changed).
    needs_sample: the step computes the request's last token, so the next one is to be sampled. When the step was
    scheduled before the last one was committed, that token's id is known only after that commit.
    is_prefill: the step computes prompt tokens, or tokens lost to a preemption; a last chunk of one token is a prefill.
    """

    request: Request
    start: int
    num_tokens: int
    needs_sample: bool
    is_prefill: bool
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one step: decodes first, then prefills, each in order of arrival.

    A request that reads blocks which another one writes in the same step comes after its writer.
    """

    requests: tuple[ScheduledRequest, ...] = ()
    num_tokens: int = 0
    num_prefill_tokens: int = 0

    @property
    def phase(self) -> Phase:
        if not self.requests:
            return "idle"
        if self.num_prefill_tokens == 0:
            return "decode"
        return "prefill" if self.num_prefill_tokens == self.num_tokens else "mixed"

    @property
    def uniform_query(self) -> int:
        """Tokens per request if all requests are decodes with the same number of new tokens, else 0."""
        lens = {row.num_tokens for row in self.requests}
        return lens.pop() if len(lens) == 1 and self.num_prefill_tokens == 0 else 0


class BatchBuilder:
    """The step being scheduled. budget: tokens that may still be added. is_short: some request found no free block."""

    __slots__ = ("_num_prefill_tokens", "_num_tokens", "_rows", "budget", "is_short")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.is_short = False
        self._rows: list[ScheduledRequest] = []
        self._num_tokens = 0
        self._num_prefill_tokens = 0

    def add(self, request: Request, num_tokens: int, is_prefill: bool) -> None:
        """Adds the next `num_tokens` of a request, which count as computed from here on."""
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + num_tokens
        self.budget -= num_tokens
        self._num_tokens += num_tokens
        if is_prefill:
            self._num_prefill_tokens += num_tokens
        self._rows.append(
            ScheduledRequest(
                request=request,
                start=start,
                num_tokens=num_tokens,
                needs_sample=end >= len(request.token_ids),
                is_prefill=is_prefill,
                block_ids=request.block_ids,
            )
        )

    def remove(self, request: Request) -> ScheduledRequest | None:
        """Takes a request out of the step again; None if it is not in it."""
        for idx, row in enumerate(self._rows):
            if row.request is request:
                del self._rows[idx]
                self.budget += row.num_tokens
                self._num_tokens -= row.num_tokens
                if row.is_prefill:
                    self._num_prefill_tokens -= row.num_tokens
                return row
        return None

    def build(self) -> Batch:
        return Batch(tuple(self._rows), self._num_tokens, self._num_prefill_tokens)
