"""Times schedule() and commit() of steady decode batches. Run by hand: python benchmarks/scheduler_step.py"""

from __future__ import annotations

import gc
import statistics
import time

from hocket.cache.manager import KVCacheManager
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.scheduler import Scheduler

PROMPT_LEN, STEPS = 500, 2000


def time_decode(num_requests: int, is_ahead: bool) -> tuple[float, float]:
    """Median and 99th percentile, µs, of schedule + commit; is_ahead: schedule(n + 1) before commit(n)."""
    cache = KVCacheManager(num_blocks=num_requests * 200, block_size=16)
    scheduler = Scheduler(max_num_seqs=num_requests, max_num_batched_tokens=8192, max_model_len=4096, cache=cache)
    params = SamplingParams(max_tokens=None, stop_token_ids=[3])
    for i in range(num_requests):
        prompt = [(i * 7919 + pos) % 30000 + 10 for pos in range(PROMPT_LEN)]
        scheduler.add(Request(EngineRequest(f"r{i}", prompt, params, eos_token_ids=[1], max_tokens=STEPS + 100)))
    while scheduler.num_decoding < num_requests:
        batch = scheduler.schedule()
        scheduler.commit(batch, [7 if row.needs_sample else None for row in batch.requests])
    sampled: list[int | None] = [11] * num_requests
    ahead = scheduler.schedule() if is_ahead else None
    times_us = []
    gc.collect()
    for step in range(STEPS):
        start = time.perf_counter_ns()
        batch = scheduler.schedule(step)
        done, ahead = (ahead, batch) if ahead is not None else (batch, None)
        scheduler.commit(done, sampled)
        times_us.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times_us), statistics.quantiles(times_us, n=100)[98]


def main() -> None:
    print("schedule + commit, decode only, block size 16, prefix caching on [µs]")
    for num_requests in (1, 32, 128, 256):
        for is_ahead in (False, True):
            median_us, p99_us = time_decode(num_requests, is_ahead)
            print(f"{num_requests:4} requests, {'ahead' if is_ahead else 'plain'}: {median_us:7.1f}  p99 {p99_us:7.1f}")


if __name__ == "__main__":
    main()
