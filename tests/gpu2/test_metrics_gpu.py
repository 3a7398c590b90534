"""What GPU ranks tell metrics: sampled experts, hand-overs, bytes; no times of transfers: nobody knows them there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import greedy, ids_of
from gloo_groups import Groups

from hocket.llm import LLM
from hocket.metrics.requests import RequestTimes
from hocket.metrics.samples import rank_samples
from hocket.worker.expert_load import EVERY

EAGER = {"enforce_eager": True, "enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20]]
FIRST = 2 * EVERY + 8
"""Steps, so that the next prompts are not in one that is counted."""
LIMIT_S = 20.0


class Heard(RequestTimes):
    """A listener that keeps the ranks' answers. (prometheus-client need not be here.)"""

    def __init__(self) -> None:
        super().__init__(2)
        self.stats: dict[int, dict[str, Any]] = {}

    def counted(self, stats: dict[str, Any]) -> None:
        self.stats[stats["rank"]] = stats


def asked(llm: LLM) -> list[dict[str, Any]]:
    heard = llm.client.listener = Heard()
    llm.client.ask_counters()
    deadline = time.monotonic() + LIMIT_S
    while len(heard.stats) < 2:
        llm.client.poll(0.1)
        assert time.monotonic() < deadline
    return [heard.stats[rank] for rank in (0, 1)]


@pytest.mark.parametrize("device", ["cuda"])
def test_counters(groups: Groups, checkpoints: Callable[..., Path], device: str) -> None:
    """Two requests decode on each rank; one step in 32 counts the experts that their tokens choose."""
    with groups.llm(checkpoints("qwen3"), 2, device=device, dtype="float32", max_model_len=256, **EAGER) as llm:
        run = llm.generate(PROMPTS, greedy(FIRST), data_parallel_rank=[0, 0, 1, 1])
        assert [stats["expert_load"] for stats in asked(llm)] == [{}, {}], "off until it is asked for"
        again = llm.generate(PROMPTS, greedy(4 * EVERY), data_parallel_rank=[0, 0, 1, 1])
        ranks = asked(llm)
        top_k = llm.config.model.moe.top_k
    assert [ids[:FIRST] for ids in ids_of(again)] == ids_of(run), "counting changes no answer"
    for stats in ranks:
        load, overlap = stats["expert_load"], stats["overlap"]
        values = np.frombuffer(load["values"], np.float32).reshape(load["num_layers"], load["num_experts"])
        assert values.sum(axis=1) == pytest.approx(2 * top_k, rel=0.01)
        assert overlap["split"] >= 6 * EVERY - 4
        assert overlap["hand_over_us"] > 0
        assert all(overlap["comm"][kind]["bytes"] > 0 for kind in ("dispatch", "combine"))
        assert sum(overlap["ubatch_sizes"]["counts"]) == 2 * overlap["split"]
        is_timed = device == "cpu"
        assert (overlap["timed"] > 0) is is_timed
        assert (overlap["comm_us"] > 0) is is_timed
        names = {sample.name for sample in rank_samples(stats, has_comm_times=is_timed)}
        assert ("comm_seconds" in names) is is_timed
