"""Where a step is cut into ubatches: ranges of tokens and requests. Integers only; knows no tensors.

Words: *padded* tokens are the rows every rank counts for the step, the largest rank's number, so that the cuts are at
the same rows on all ranks; *real* ones are this rank's own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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


def equal_bounds(num_padded: int, num_ubatches: int, unit: int = 1) -> tuple[int, ...]:
    """Ends of `num_ubatches` parts of `num_padded` tokens: equal, the last takes the rest.

    `unit` tokens, which all counts are multiples of, stay together: in a uniform decode those of a request.
    """
    part = num_padded // unit // num_ubatches * unit
    return (*(part * (i + 1) for i in range(num_ubatches - 1)), num_padded)


def scaled_bounds(cuts: Sequence[int], num_tokens: int, num_padded: int, unit: int = 1) -> tuple[int, ...]:
    """Ends of parts of `num_padded` tokens in the proportions of the parts that `cuts` makes of `num_tokens` of them.

    With num_padded ≥ num_tokens no part is smaller than the one it is made from (⌊x·f⌋ − ⌊y·f⌋ ≥ x − y for f ≥ 1).
    """
    num_units, units_padded = num_tokens // unit, num_padded // unit
    return (*(cut // unit * units_padded // num_units * unit for cut in cuts), num_padded)


def fitted_bounds(cuts: Sequence[int], num_tokens: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """Ends of the parts of a rank's own `num_tokens`: one after the other as near to `cuts` as there is room.

    Part i holds at most the tokens of padded part i, and what is left after it fits into the padded parts after it.
    """
    ends, first, begin = [], 0, 0
    for cut, end in zip(cuts, bounds, strict=False):
        least = max(first, num_tokens - (bounds[-1] - end))
        most = first + end - begin
        first, begin = min(max(cut, least), most), end
        ends.append(first)
    return (*ends, num_tokens)


def cut_batch(query_lens: Sequence[int], bounds: Sequence[int], ends: Sequence[int] | None = None) -> Cut:
    """Cut a rank's batch of requests with `query_lens` tokens each at the padded token numbers `bounds`.

    ends: where its own tokens are cut (`fitted_bounds`); None: at the same numbers, so that the last parts are short.
    A ubatch's first request is the one that holds its first token; its last one the last that starts before its end.
    The last padded slice also takes the requests beyond the real ones (there are none here) and all padding.
    """
    starts = [0, *accumulate(query_lens)]
    num_tokens, num_requests = starts[-1], len(query_lens)
    if ends is None:
        ends = [min(end, num_tokens) for end in bounds]

    def parts(of: Sequence[int]) -> tuple[UBatchSlice, ...]:
        return tuple(
            UBatchSlice(begin, end, *_requests(starts, num_requests, begin, end)) for begin, end in pairwise((0, *of))
        )

    return Cut(real=parts(ends), padded=parts(bounds))


def _requests(starts: Sequence[int], num_requests: int, begin: int, end: int) -> tuple[int, int]:
    """The range of requests that have a token in [begin, end); empty ranges stand where the next request would."""
    first = min(bisect_right(starts, begin) - 1, num_requests)
    if begin >= min(end, starts[-1]):
        return first, first
    return first, min(bisect_left(starts, end), num_requests)
