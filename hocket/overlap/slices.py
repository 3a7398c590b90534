"""Where a step is cut into ubatches: ranges of tokens and requests. Integers only; knows no tensors.

Words: *padded* tokens are the rows every rank counts for the step, the largest rank's number, so that the cuts are at
the same rows on all ranks; *real* ones are this rank's own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class UBatchSlice:
    """Half-open ranges of a batch's tokens and requests; a request cut in two is in both of its ubatches."""

    token_start: int
    token_stop: int
    request_start: int
    request_stop: int

    @property
    def num_tokens(self) -> int:
        return self.token_stop - self.token_start

    @property
    def num_requests(self) -> int:
        return self.request_stop - self.request_start


@dataclass(frozen=True, slots=True)
class Cut:
    """One step's ubatches, two parallel tuples. real: this rank's tokens, possibly none, also in the middle.
    padded: the same rows on every rank; they cover all padded tokens."""

    real: tuple[UBatchSlice, ...]
    padded: tuple[UBatchSlice, ...]


def equal_bounds(num_padded: int, num_ubatches: int) -> tuple[int, ...]:
    """Ends of `num_ubatches` parts of `num_padded` tokens: equal, the last takes the rest."""
    part = num_padded // num_ubatches
    return (*(part * (i + 1) for i in range(num_ubatches - 1)), num_padded)


def cut_batch(query_lens: Sequence[int], bounds: Sequence[int]) -> Cut:
    """Cut a rank's batch of requests with `query_lens` tokens each at the padded token numbers `bounds`.

    A ubatch's first request is the one that holds its first token; its last one the last that starts before its end.
    The last padded slice also takes the requests beyond the real ones (there are none here) and all padding.
    """
    starts = [0, *accumulate(query_lens)]
    num_tokens, num_requests = starts[-1], len(query_lens)
    real, padded = [], []
    begin = 0
    for end in bounds:
        padded.append(UBatchSlice(begin, end, *_requests(starts, num_requests, begin, end)))
        first, last = min(begin, num_tokens), min(end, num_tokens)
        real.append(UBatchSlice(first, last, *_requests(starts, num_requests, first, last)))
        begin = end
    return Cut(tuple(real), tuple(padded))


def _requests(starts: Sequence[int], num_requests: int, begin: int, end: int) -> tuple[int, int]:
    """The range of requests that have a token in [begin, end); empty ranges stand where the next request would."""
    first = min(bisect_right(starts, begin) - 1, num_requests)
    if begin >= min(end, starts[-1]):
        return first, first
    return first, min(bisect_left(starts, end), num_requests)
