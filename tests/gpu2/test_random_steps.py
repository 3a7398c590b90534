"""500 steps of random sizes on two GPUs: overlap changes no answer beyond ties of the dtype, and keeps no memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import assert_as_good, greedy, ids_of, settled_stats
from counters import assert_add_up
from gloo_groups import Groups
from gpus import used_bytes
from test_gpu_engine import fp32
from test_graphs import BF16

from hocket.llm import LLM
from hocket.outputs import RequestOutput

LEAST_STEPS = 500
MAX_TOKENS = 300
"""Of one rank's step."""
ASKED_TOGETHER = 24
MAX_GROWTH_BYTES = 8 << 20
"""Of a GPU's used memory, from the first quarter of the steps to the end."""
OVERLAP = {"enable_dbo": True, "dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 4}


def requests_of(seed: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Prompts of up to MAX_TOKENS random ids, how many tokens each is to make, and its rank: often one has most."""
    chance = random.Random(seed)
    share = chance.choice((0.0, 0.1, 0.5, 0.5, 0.9))
    prompts = [
        [chance.randrange(5, 60) for _ in range(chance.choice((1, 3, chance.randint(1, 80), chance.randint(80, 200))))]
        for _ in range(ASKED_TOGETHER)
    ]
    if seed % 3 == 0:  # the same beginning, from the prefix cache or written in the same step
        prompts = [prompts[0][:32] + prompt for prompt in prompts]
    return prompts, [chance.randint(1, 40) for _ in prompts], [int(chance.random() < share) for _ in prompts]


def run(llm: LLM, num_rounds: int | None) -> tuple[list[RequestOutput], int]:
    """So many rounds of requests; None: as many as LEAST_STEPS take."""
    results: list[RequestOutput] = []
    before: list[int] = []
    seed = 0
    while seed != num_rounds:
        prompts, lengths, ranks = requests_of(seed)
        params = [greedy(length) for length in lengths]
        results += llm.generate(prompts, params, data_parallel_rank=ranks, use_tqdm=False)
        seed += 1
        steps = llm.stats()[0]["steps"]
        if not before and steps >= LEAST_STEPS / 4:
            before = used_bytes()
        if num_rounds is None and steps >= LEAST_STEPS:
            break
    growth = max(now - then for now, then in zip(used_bytes(), before, strict=True))
    assert growth < MAX_GROWTH_BYTES, f"a GPU holds {growth / 1e6:.1f} MB more than after a quarter of the steps"
    return results, seed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
def test_random_steps(groups: Groups, checkpoints: Callable[..., Path], transport: str, dtype: str) -> None:
    options: dict[str, Any] = fp32() if dtype == "float32" else dict(BF16)
    options |= {"max_model_len": 512, "max_num_batched_tokens": MAX_TOKENS, "enforce_eager": True}
    options |= {"all2all_backend": transport, "kv_cache_memory_bytes": 64 << 20, "step_timeout": 60.0}
    path = checkpoints("v2-heads")
    with groups.llm(path, 2, **options, **OVERLAP) as llm:
        split, num_rounds = run(llm, None)
        found = assert_add_up(settled_stats(llm), 2)
        assert found["split"] >= LEAST_STEPS / 4, found
    with groups.llm(path, 2, **options) as llm:
        whole, _ = run(llm, num_rounds)
    if dtype == "float32":
        assert ids_of(split) == ids_of(whole)
    pairs = [pair for pair in zip(split, whole, strict=True) if len({tuple(ids) for ids in ids_of(pair)}) > 1]
    if pairs:
        assert_as_good(path, *zip(*pairs, strict=True))
