"""Prompt log-probabilities of requests that ask for them, collected over the steps of a prefill. Knows no models."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hocket.outputs import TokenLogprobs
from hocket.scheduler.batch import Batch, ScheduledRequest
from hocket.worker.sampler import prompt_logprobs


class PromptLogprobs:
    """What is found so far, by request."""

    def __init__(self) -> None:
        self._found: dict[str, list[TokenLogprobs | None]] = {}

    def rows(self, batch: Batch, starts: list[int]) -> list[int]:
        """Rows of the batch whose logits predict a prompt token that is asked for; starts: each request's first row."""
        rows: list[int] = []
        for begin, scheduled in zip(starts, batch.requests, strict=False):
            rows += range(begin, begin + _num_predicted(scheduled))
        return rows

    def collect(self, batch: Batch, logits: Tensor | None) -> dict[str, list[TokenLogprobs | None]]:
        """Take in logits fp32 [N, V] of `rows` (None: there were none); what is complete with this step."""
        done: dict[str, list[TokenLogprobs | None]] = {}
        taken = 0
        for scheduled in _asking(batch):
            request = scheduled.request
            wanted = request.params.prompt_logprobs
            assert wanted is not None
            found = self._found.setdefault(request.request_id, [None])
            del found[scheduled.start + 1 :]  # a preempted request starts again
            count = _num_predicted(scheduled)
            if count and logits is not None:
                targets = request.prompt_token_ids[scheduled.start + 1 : scheduled.start + 1 + count]
                found += prompt_logprobs(logits[taken : taken + count], targets, wanted)
                taken += count
            if scheduled.needs_sample:
                done[request.request_id] = self._found.pop(request.request_id)
        return done

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended early."""
        self._found.pop(request_id, None)


def _asking(batch: Batch) -> Iterator[ScheduledRequest]:
    for scheduled in batch.requests:
        if scheduled.request.params.prompt_logprobs is not None and scheduled.request.num_output_tokens == 0:
            yield scheduled


def _num_predicted(scheduled: ScheduledRequest) -> int:
    """How many of a request's rows predict one of its prompt tokens, if it asks for their log-probabilities."""
    request = scheduled.request
    if request.params.prompt_logprobs is None or request.num_output_tokens > 0:
        return 0
    last = min(scheduled.start + scheduled.num_tokens, request.num_prompt_tokens - 1)
    return max(last - scheduled.start, 0)
