"""Which rank gets a request: what each has to do, and who has the prompt's beginning in its cache. Knows no channel.

A rank that has computed a long prefix saves its tokens for the next request that begins so; but it may have more to do
than others. Both are tokens, so the rule is one: the request goes to the rank with the least of

    tokens that its requests still need - tokens of the prompt that it has.

That rank has at most as many more than the least busy one as it saves, so a prefix that all share leaves no rank idle.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.cache.prefix import extend_hashes
from hocket.outputs import TokenOutput
from hocket.request import EngineRequest, FinishReason

MIN_PREFIX_TOKENS = 64
"""Shorter prefixes are not worth a look, and longer ones are compared in steps of so many tokens."""
MAX_NAMES = 2**18
"""Over all ranks; each takes some 200 bytes."""
_WEIGHT_OF_NEWEST = 1 / 16


class PrefixMemory:
    """The prefixes that each rank was sent, as far as its cache is likely to have them still.

    A prefix is known by the cache's chained hashes, one for every `chunk_size` tokens, a multiple of `block_size`. Of
    each rank the `max_names` used last are kept, of one prompt its beginning longest, as the cache does.
    """

    def __init__(self, num_ranks: int, block_size: int, max_names: int) -> None:
        self.chunk_size = _chunk_size(block_size)
        self._max_names = max_names
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_ranks)]

    @classmethod
    def of_caches(cls, num_blocks: Sequence[int], block_size: int) -> PrefixMemory:
        """As large as the ranks' caches of so many blocks, but for the largest ones. num_blocks: by rank."""
        num_chunks = min(num_blocks) * block_size // _chunk_size(block_size)
        return cls(len(num_blocks), block_size, min(num_chunks, MAX_NAMES // len(num_blocks)))

    def names(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of the prefixes of a prompt. Its last token is in none, as it is always computed."""
        found: list[bytes] = []
        extend_hashes(found, token_ids, self.chunk_size, (len(token_ids) - 1) // self.chunk_size)
        return found

    def num_known(self, rank: int, names: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that the rank has."""
        known = self._known[rank]
        return self.chunk_size * next((i for i, name in enumerate(names) if name not in known), len(names))

    def remember(self, rank: int, names: Sequence[bytes]) -> None:
        """The rank is sent a prompt with these prefixes."""
        known = self._known[rank]
        for name in reversed(names):
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._max_names:
            known.popitem(last=False)


def _chunk_size(block_size: int) -> int:
    return block_size * -(-MIN_PREFIX_TOKENS // block_size)


@dataclass
class RankLoad:
    """What a rank still has to do. busy_since: when it last had nothing to do before (time.monotonic)."""

    num_requests: int = 0
    num_tokens: int = 0
    busy_since: float = 0.0


@dataclass(slots=True)
class Placed:
    """Where an engine request is, and the tokens that its rank still counts for it.

    num_known: tokens of its prompt that the rank was thought to have. num_made: tokens that it got.
    """

    rank: int
    num_known: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_made: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class Balance:
    """Places requests and counts what ranks have to do. loads: by rank, from `first_rank` on.

    by_tokens: by the fewest tokens, else by the fewest requests; the other one decides between equals. prefixes: None:
    what ranks have in their caches does not matter.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        by_tokens: bool = False,
        prefixes: PrefixMemory | None = None,
        first_rank: int = 0,
    ) -> None:
        self._first_rank = first_rank
        self.loads = [RankLoad() for _ in range(num_ranks)]
        self.placed: dict[str, Placed] = {}
        """Requests that are not over, by id."""
        self._by_tokens = by_tokens
        self._prefixes = prefixes
        self._usual_output: float | None = None

    def place(self, request: EngineRequest, rank: int | None = None) -> Placed:
        """Give a request to `rank`, or to the one that is best."""
        prefixes, token_ids = self._prefixes, request.prompt_token_ids
        names = [] if prefixes is None else prefixes.names(token_ids)
        known = [0] * len(self.loads)
        if prefixes is not None and request.params.prompt_logprobs is None:  # which have every token computed
            known = [prefixes.num_known(one, names) for one in range(len(self.loads))]
        if rank is None:
            idx = min(range(len(self.loads)), key=lambda one: self._burden(self.loads[one], known[one]))
        else:
            idx = rank - self._first_rank
        if prefixes is not None:
            prefixes.remember(idx, names)
        num_known = known[idx]
        placed = Placed(idx + self._first_rank, num_known, len(token_ids) - num_known, self._expected_output(request))
        load = self.loads[idx]
        if load.num_requests == 0:
            load.busy_since = time.monotonic()
        load.num_requests += 1
        load.num_tokens += placed.num_tokens
        self.placed[request.request_id] = placed
        return placed

    def _burden(self, load: RankLoad, num_known: int) -> tuple[int, int]:
        if self._by_tokens:
            return load.num_tokens - num_known, load.num_requests
        return load.num_requests, load.num_tokens

    def _expected_output(self, request: EngineRequest) -> int:
        """Tokens: as many as a request may have; where it has no limit of its own, as many as others had of late."""
        if request.params.max_tokens is not None or self._usual_output is None:
            return request.max_tokens
        return min(request.max_tokens, round(self._usual_output))

    def computed(self, output: TokenOutput) -> None:
        """A request has fewer tokens to go: those of this output and, with the first one, those of its prompt."""
        placed = self.placed.get(output.request_id)
        if placed is None or not self._by_tokens:
            return
        num_new = len(output.token_ids)
        done = placed.num_prompt_tokens + min(num_new, placed.num_output_tokens)
        placed.num_output_tokens -= done - placed.num_prompt_tokens
        placed.num_prompt_tokens = 0
        placed.num_made += num_new
        self.loads[placed.rank - self._first_rank].num_tokens -= done

    def ended(self, request_id: str, reason: FinishReason | str) -> Placed | None:
        """A request is over; None where it was so before."""
        placed = self.placed.pop(request_id, None)
        if placed is None:
            return None
        load = self.loads[placed.rank - self._first_rank]
        load.num_requests -= 1
        load.num_tokens -= placed.num_tokens
        if reason == "stop" and self._by_tokens:
            before = placed.num_made if self._usual_output is None else self._usual_output
            self._usual_output = before + _WEIGHT_OF_NEWEST * (placed.num_made - before)
        return placed
