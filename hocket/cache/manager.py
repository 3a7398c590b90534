"""Gives requests the KV blocks they need and finds prefixes computed before. Knows no tensors, steps or queues."""

from __future__ import annotations

from hocket.cache.block_pool import BlockPool
from hocket.cache.prefix import extend_hashes
from hocket.errors import ConfigError
from hocket.request import Request


class KVCacheManager:
    """Block tables (`request.block_ids`) over one pool, with prefix caching by chained block hashes.

    A block can be found from the moment a step that will fill it is scheduled, so a later request of the same step may
    read it. Hence `forget`: whoever drops a scheduled step must take back the names given for it.

    num_prefix_queries, num_prefix_hits: prompt tokens looked up, and found, counted once per request (when it is first
    admitted, not after a preemption; not for requests that never read the cache).
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        for field, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(field, value, "at least 1")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._pool = BlockPool(num_blocks)
        # request_id → how many of its blocks have been offered a name.
        self._num_named: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request owns, whether or not they hold a known prefix."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own, 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def lookup(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix of the request, in order; changes nothing but its hashes.

        At least one token is left to compute, so the last full block of a wholly known prompt is not among them. A
        request for prompt log-probs has to compute every token and gets none.
        """
        if not self._reads_prefixes(request):
            return []
        num_tokens = len(request.token_ids)
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, num_tokens // self.block_size)
        block_ids: list[int] = []
        for name in request.block_hashes[: (num_tokens - 1) // self.block_size]:
            block_id = self._pool.find(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _reads_prefixes(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def num_owed_blocks(self, request: Request) -> int:
        """Blocks that the tokens the request has now still need."""
        return max(0, -(-len(request.token_ids) // self.block_size) - len(request.block_ids))

    def admit(self, request: Request, cached_block_ids: list[int], num_owed: int = 0) -> bool:
        """Makes what `lookup` found the start of the request's block table and its tokens computed.

        False, and nothing changes, unless all tokens the request has now would fit beside `num_owed` blocks for others:
        a long prompt is not begun when there is no room to end it. `allocate` takes that room chunk by chunk.
        """
        pool = self._pool
        num_unowned = sum(1 for block_id in cached_block_ids if pool.ref_count(block_id) == 0)
        num_needed = self.num_owed_blocks(request) - len(cached_block_ids) + num_unowned
        if num_needed + num_owed > pool.num_free:
            return False
        pool.share(cached_block_ids)
        request.block_ids = list(cached_block_ids)
        request.num_computed_tokens = len(cached_block_ids) * self.block_size
        self._num_named[request.request_id] = len(cached_block_ids)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            if self._reads_prefixes(request):
                self.num_prefix_queries += len(request.token_ids)
                self.num_prefix_hits += request.num_computed_tokens
        return True

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Extends the block table for the next `num_new_tokens` after `num_computed_tokens`, and names the blocks they
        fill. False, and nothing changes, if too few blocks are free."""
        end = request.num_computed_tokens + num_new_tokens
        num_missing = -(-end // self.block_size) - len(request.block_ids)
        if num_missing > 0:
            if num_missing > self._pool.num_free:
                return False
            request.block_ids += self._pool.take(num_missing)
        if self.enable_prefix_caching:
            # A token that is still being sampled has no id yet; its block is named one step later.
            num_full = min(end, len(request.token_ids)) // self.block_size
            num_named = self._num_named.get(request.request_id, 0)
            if num_full > num_named:
                self._name_blocks(request, num_named, num_full)
        return True

    def _name_blocks(self, request: Request, num_named: int, num_full: int) -> None:
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, num_full)
        for idx in range(num_named, num_full):
            self._pool.name(request.block_ids[idx], request.block_hashes[idx])
        self._num_named[request.request_id] = num_full

    def forget(self, request: Request, start: int, end: int) -> None:
        """Tokens `start` to `end` of the request were scheduled but will not be computed: the blocks they would have
        filled can no longer be found. The request does not go on: it is freed next, or has been already."""
        for name in request.block_hashes[start // self.block_size : end // self.block_size]:
            self._pool.forget(name)

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request (none is fine). Batches scheduled earlier keep their own table."""
        self._num_named.pop(request.request_id, None)
        self._pool.release(request.block_ids)
        request.block_ids = []

    def clear_prefixes(self) -> None:
        """Forgets every known prefix; running requests keep their blocks."""
        self._pool.forget_all()
