"""Split steps whose multiprocessors are divided: what the ranks say of it, and that answers stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from answers import assert_right, greedy, prompts, settled_stats
from counters import assert_add_up
from gloo_groups import Groups
from test_gpu_engine import fp32
from test_overlap_gpu import LENGTHS, SLOW_START, thresholds


@pytest.mark.parametrize(
    ("comm_sms", "green_context", "transport", "executor"),
    [
        (20, "0", "allgather_reducescatter", "greenlet"),
        (20, "1", "allgather_reducescatter", "thread"),
        (4, "1", "torch", "greenlet"),
        (4, "0", "torch", "thread"),
    ],
)
def test_same_answers(
    groups: Groups,
    checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    comm_sms: int,
    green_context: str,
    transport: str,
    executor: str,
) -> None:
    monkeypatch.setenv("HOCKET_DBO_COMM_SMS", str(comm_sms))
    monkeypatch.setenv("HOCKET_DBO_GREEN_CONTEXT", green_context)
    path = checkpoints("v2")
    options = fp32(ubatch_size=2, all2all_backend=transport, ubatch_executor=executor, **thresholds(2), **SLOW_START)
    step = 8 if green_context == "1" else 2
    compute = (torch.cuda.get_device_properties(0).multi_processor_count - comm_sms) // step * step
    with groups.llm(path, 2, enforce_eager=True, **options) as llm:
        assert [info["sms"] for info in llm.ranks] == [{"comm_sms": comm_sms, "compute_sms": compute}] * 2
        assert llm.config.parallel.max_nccl_ctas == comm_sms
        for _ in range(2):
            results = llm.generate(prompts(path, LENGTHS, num_tokens=12), greedy(12, logprobs=2), use_tqdm=False)
            assert_right(path, results)
        assert assert_add_up(settled_stats(llm), 2)["split"] >= 12
