"""`hocket explain`: its figures are the vote's and the schedule's, and it starts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hocket.cli.explain import describe
from hocket.config.options import Options
from hocket.config.resolve import resolve


def described(**options: Any) -> dict[str, Any]:
    return describe(resolve(Options.from_dict(options)))


DBO = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}


def test_thresholds() -> None:
    found = described(**DBO, dbo_decode_token_threshold=5, dbo_prefill_token_threshold=7, max_num_seqs=9)
    assert found["splits"]["decode"] == [
        {"tokens": [1, 4], "reason": "below_threshold"},
        {"tokens": [5, 9], "reason": "split"},
    ]
    assert found["splits"]["prefill"] == [
        {"tokens": [1, 6], "reason": "below_threshold"},
        {"tokens": [7, 2048], "reason": "split"},
    ]


def test_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    found = described()
    assert found["num_ubatches"] == 3
    assert [run["reason"] for run in found["splits"]["decode"]] == ["split"]


def test_schedule_follows_the_transport() -> None:
    plain = described(**DBO)["schedules"]["prefill"]
    assert plain["lanes"][0] == {"comm": "D₀", "compute": ["A0₁", "A1₁"]}
    assert not any("recv" in launch for launch in plain["order"])
    apart = described(**DBO, emulate_link_gb_per_s=1)["schedules"]["prefill"]
    assert apart["order"].index("D₀ recv") < apart["order"].index("D₁ send")
    assert len(described(**{**DBO, "enable_dbo": False, "ubatch_size": 3})["schedules"]["decode"]["lanes"]) == 6


def test_on_gpus_decodes_replay_graphs_and_torch_hands_over_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.config.resolve.num_gpus", lambda: 2)
    found = described(**DBO, max_num_seqs=64, max_cudagraph_capture_size=40)
    assert found["splits"]["decode"] == [
        {"tokens": [1, 31], "reason": "below_threshold"},
        {"tokens": [32, 40], "reason": "no_split_graph"},
        {"tokens": [41, 64], "reason": "split"},
    ]
    eager = described(**DBO, all2all_backend="torch", max_num_seqs=64)
    assert [run["reason"] for run in eager["splits"]["decode"]] == ["below_threshold", "split"]
    assert eager["schedules"]["prefill"]["name"] != found["schedules"]["prefill"]["name"]


def test_placement() -> None:
    assert described(data_parallel_size=3, enable_expert_parallel=True)["experts"]["by_rank"] == [6, 5, 5]
    assert described(data_parallel_size=3)["experts"]["by_rank"] == [16]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hocket.cli.main", "explain", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_command() -> None:
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo"]
    text = run(*flags)
    assert text.returncode == 0, text.stderr
    assert "compute │ A0₁ A1₁ │ M₀" in text.stdout
    assert "tokens per rank 1–31: below_threshold, 32–256: split" in text.stdout
    assert json.loads(run(*flags, "--json").stdout) == described(**DBO)
    wrong = run("--enable-dbo")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "enable_dbo" in wrong.stderr


def test_what_never_splits_is_said_and_who_forces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo"]
    never = run(*flags, "--max-num-batched-tokens", "100", "--max-num-seqs", "10")
    assert "no step can be split: lower the thresholds" in never.stdout
    assert "launched" not in never.stdout
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    assert "every step: HOCKET_FORCE_SPLIT is set" in run().stdout
