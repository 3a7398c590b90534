"""Batches made for measuring, of requests that nobody asked for. Knows no engine and no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, BatchBuilder


def made_batch(
    lens: Sequence[tuple[int, int]], token_ids: Iterator[int], block_size: int, most_blocks: int | None = None
) -> Batch:
    """One request for each of `lens`: (tokens whose cache entries are taken to exist, new tokens).

    Blocks are numbered from 0 on, and from 0 again behind `most_blocks`; a request with a past is a decode.
    """
    builder, num_blocks = BatchBuilder(sum(new for _, new in lens)), 0
    for idx, (past, new) in enumerate(lens):
        request = Request(EngineRequest(f"made-{idx}", list(islice(token_ids, past + new)), SamplingParams()))
        request.num_computed_tokens = past
        ids = range(num_blocks, num_blocks + -(-(past + new) // block_size))
        request.block_ids = [idx % (most_blocks or ids.stop) for idx in ids]
        num_blocks = ids.stop
        builder.add(request, new, is_prefill=past == 0)
    return builder.build()


def prompt_lens(num_tokens: int, longest: int) -> list[tuple[int, int]]:
    """`num_tokens` tokens in prompts of `longest`, the last one with what is left."""
    return [(0, min(longest, num_tokens - done)) for done in range(0, num_tokens, longest)]


def decode_lens(num_requests: int, context: int) -> list[tuple[int, int]]:
    """Requests of one new token each that sees `context` tokens, itself included."""
    return [(context - 1, 1)] * num_requests


def blocks_taken(batch: Batch) -> int:
    """Cache blocks that its requests take."""
    return sum(len(row.block_ids) for row in batch.requests)
