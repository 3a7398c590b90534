"""Small schedulers and requests for the scheduler's tests."""

from __future__ import annotations

from typing import Any

from hocket.cache.manager import KVCacheManager
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch
from hocket.scheduler.scheduler import Scheduler

EOS, STOP, PLAIN = 1, 2, 7
Rows = list[tuple[str, int, int]]


def make_scheduler(num_blocks: int = 64, block_size: int = 4, is_caching: bool = True, **options: Any) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **options}
    return Scheduler(cache=KVCacheManager(num_blocks, block_size, is_caching), **values)


def make_request(name: str, num_tokens: int, max_tokens: int = 50, **params: Any) -> Request:
    """A prompt that shares no prefix with any other name's."""
    prompt = [100 + ord(name[0])] * num_tokens
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(EngineRequest(name, prompt, sampling, [EOS], [], max_tokens))


def rows(batch: Batch) -> Rows:
    return [(row.request.request_id, row.start, row.num_tokens) for row in batch.requests]


def commit(scheduler: Scheduler, batch: Batch, token_id: int = PLAIN) -> list[int | None]:
    sampled = [token_id if row.needs_sample else None for row in batch.requests]
    return [accepted for _, accepted in scheduler.commit(batch, sampled)]


def step(scheduler: Scheduler, token_id: int = PLAIN, **options: Any) -> Rows:
    batch = scheduler.schedule(**options)
    commit(scheduler, batch, token_id)
    return rows(batch)
