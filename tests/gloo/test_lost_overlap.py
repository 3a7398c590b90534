"""A fault that changes no answer and costs all of the overlap: traces and counters show it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import greedy, ids_of
from faulty import faulty_groups
from gloo_groups import Groups
from trace_checks import check_events, figures_of

from hocket.bench.trace import Workload, record
from hocket.config.backends import EXECUTORS, NCCL_TRANSPORTS
from hocket.config.options import Options
from hocket.trace import perfetto

FAULT = "events recorded after the hand-over"
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "step_timeout": 20.0,
    "enable_dbo": True,
    "dbo_prefill_token_threshold": 2,
    "dbo_decode_token_threshold": 2,
    "emulate_link_gb_per_s": 0.06,  # about as slow as tiny's compute
}
PROMPTS = [[5 + i, *range(6, 40)] for i in range(6)]


@pytest.fixture(scope="module")
def faulty(fault_file: Path) -> Iterator[Groups]:
    with faulty_groups("overlap_faults:install", fault_file) as made:
        yield made


def hidden_shares(groups: Groups, options: dict[str, Any]) -> list[float]:
    """Of each rank's communication, as `hocket trace` has it in its file."""
    work = Workload(phase="prefill", num_steps=3, prompt_len=192)
    recording = record(Options.from_dict(options), work, group=groups.get(2))
    assert recording.num_ubatches == 2
    content = perfetto.to_json(recording)
    check_events(content)
    raw = [figures_of(content, rank) for rank in (0, 1)]
    for found, figures in zip(raw, recording.figures(), strict=True):
        assert found["hidden"] == pytest.approx(figures.per_step_us()["hidden"], rel=0.02, abs=20.0)
    return [figures.hidden_share for figures in recording.figures()]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("transport", NCCL_TRANSPORTS)
def test_a_trace_shows_it(faulty: Groups, fault_file: Path, executor: str, transport: str) -> None:
    options = OPTIONS | {"ubatch_executor": executor, "all2all_backend": transport}
    fault_file.write_text("")
    right = hidden_shares(faulty, options)
    fault_file.write_text(FAULT)
    wrong = hidden_shares(faulty, options)
    print(f"{executor}, {transport}: hidden {right} without the fault, {wrong} with it")
    assert min(right) > 0.1, "on a busy machine too"
    assert max(wrong) < 0.02


def test_answers_stay_and_the_counters_show_it(faulty: Groups, fault_file: Path) -> None:
    answers, exposed = [], []
    for fault in ("", FAULT):
        fault_file.write_text(fault)
        given = {name: value for name, value in OPTIONS.items() if name not in ("model", "data_parallel_size")}
        with faulty.llm("tiny", 2, **given) as llm:
            answers.append(ids_of(llm.generate(PROMPTS, greedy(4), data_parallel_rank=[0, 1] * 3)))
            ranks = [rank["overlap"] for rank in llm.stats()]
            assert all(rank["split"] >= 4 for rank in ranks)
            exposed.append([rank["exposed_comm_us"] / rank["comm_us"] for rank in ranks])
    assert answers[0] == answers[1]
    print(f"exposed {exposed[0]} without the fault, {exposed[1]} with it")
    assert max(exposed[0]) < 0.9
    assert min(exposed[1]) > 0.97
