"""What requests took, rank by rank, as the front sees it: tokens, ends, and times. Knows no names of metrics.

All is per engine request: a prompt with `n` completions is n of them. Times are of the front's monotonic clock, but for
the wait on a rank, which that rank measures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hocket.metrics.histogram import Histogram
from hocket.outputs import TokenOutput
from hocket.request import EngineRequest

QUICK_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets for the time between tokens."""
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets for what happens once to a request."""
TOKENS = tuple(2**i for i in range(18))


def _slow() -> Histogram:
    return Histogram(SLOW_S)


def _quick() -> Histogram:
    return Histogram(QUICK_S)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class RankRequests:
    """Of one rank's requests since the start.

    known_prompt_tokens: those that it was thought to have in its prefix cache when it was sent their requests.
    prompt_tokens: of requests that had their first token, those found in the prefix cache included. The times of whole
    requests are of those that came to an end of their own (stop, length).
    """

    known_prompt_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    first_token_s: Histogram = field(default_factory=_slow)
    inter_token_s: Histogram = field(default_factory=_quick)
    per_output_token_s: Histogram = field(default_factory=_quick)
    end_to_end_s: Histogram = field(default_factory=_slow)
    queue_s: Histogram = field(default_factory=_slow)
    prefill_s: Histogram = field(default_factory=_slow)
    decode_s: Histogram = field(default_factory=_slow)
    inference_s: Histogram = field(default_factory=_slow)
    prompt_sizes: Histogram = field(default_factory=_tokens)
    generation_sizes: Histogram = field(default_factory=_tokens)


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

    rank: int
    num_prompt_tokens: int
    arrived_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    queue_s: float = 0.0
    num_tokens: int = 0


class RequestTimes:
    """Follows requests from their arrival to their end. `ranks`: whose requests; then the sums, by rank."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = {rank: RankRequests() for rank in ranks}
        self._open: dict[str, _Open] = {}

    def added(self, rank: int, request: EngineRequest, arrived_at: float, num_known: int) -> None:
        """As `hocket.client.Listener`, also below."""
        self.ranks[rank].known_prompt_tokens += num_known
        self._open[request.request_id] = _Open(rank, len(request.prompt_token_ids), arrived_at)

    def gained(self, output: TokenOutput, now: float) -> None:
        one, num_new = self._open.get(output.request_id), len(output.token_ids)
        if one is None or not num_new:
            return
        sums = self.ranks[one.rank]
        if one.num_tokens:
            sums.inter_token_s.add(now - one.last_at)
        else:
            one.first_at, one.queue_s = now, output.queue_s
            sums.prompt_tokens += one.num_prompt_tokens
            sums.first_token_s.add(now - one.arrived_at)
        one.last_at = now
        one.num_tokens += num_new
        sums.generation_tokens += num_new

    def ended(self, request_id: str, reason: str, now: float) -> None:
        one = self._open.pop(request_id, None)
        if one is None:
            return
        sums = self.ranks[one.rank]
        sums.ends[reason] = sums.ends.get(reason, 0) + 1
        if reason in ("stop", "length") and one.num_tokens:
            self._take_times(sums, one, now)

    def lost(self, now: float) -> None:
        """The ranks are gone, with every request."""
        for request_id in list(self._open):
            self.ended(request_id, "error", now)

    def _take_times(self, sums: RankRequests, one: _Open, now: float) -> None:
        sums.end_to_end_s.add(now - one.arrived_at)
        sums.queue_s.add(one.queue_s)
        sums.prefill_s.add(max(one.first_at - one.arrived_at - one.queue_s, 0.0))
        sums.decode_s.add(one.last_at - one.first_at)
        sums.inference_s.add(max(one.last_at - one.arrived_at - one.queue_s, 0.0))
        if one.num_tokens > 1:
            sums.per_output_token_s.add((one.last_at - one.first_at) / (one.num_tokens - 1))
        sums.prompt_sizes.add(one.num_prompt_tokens)
        sums.generation_sizes.add(one.num_tokens)
