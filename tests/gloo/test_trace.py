"""`hocket trace` on real ranks: its files hold together, and its figures are those of the raw intervals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo_groups import Groups
from trace_checks import check_events, figures_of

from hocket.bench.trace import Workload, record
from hocket.config.options import Options
from hocket.errors import HocketError
from hocket.trace import perfetto
from hocket.trace.clocks import bounds
from hocket.trace.recording import Recording

ROOT = Path(__file__).resolve().parents[2]
RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel")
SMALL = ("--prompt-len", "96", "--num-steps", "2")


def trace(folder: Path, *args: str) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hocket.cli.main", "trace", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def options(model: str | Path, **given: Any) -> Options:
    values = {"model": str(model), "data_parallel_size": 2, "enable_expert_parallel": True, "step_timeout": 20.0}
    return Options.from_dict(values | given)


def test_with_overlap_and_two_side_by_side(tmp_path: Path) -> None:
    split = ("--enable-dbo", "--dbo-prefill-token-threshold", "64", "--emulate-link-gb-per-s", "0.1")
    code, out, err = trace(tmp_path, *RANKS, *SMALL, *split, "--output", "after")
    assert code == 0, err
    content = json.loads((tmp_path / "after.json").read_text())
    check_events(content)
    names = {event["name"] for event in content["traceEvents"]}
    for ubatch in (0, 1):
        for name in (
            "qkv",
            "attn",
            "dispatch send",
            "dispatch recv",
            "experts",
            "combine send",
            "combine recv",
            "shared",
        ):
            assert f"ub{ubatch} {name}" in names
    assert sum(event["ph"] == "s" for event in content["traceEvents"]) >= 2 * 2 * 5 * 2, "ranks, steps, layers"
    for rank in (0, 1):
        found = content["otherData"]["figures_us"][rank]
        expected = figures_of(content, rank)
        assert expected["hidden"] > 0
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=0.02), name
    assert "EMULATED" in out
    assert content["otherData"]["strategy"] == "2 ubatches"
    steps = [[e for e in content["traceEvents"] if e.get("cat") == "step" and e["pid"] == rank] for rank in (0, 1)]
    for first, second in zip(*steps, strict=True):
        overlap = min(e["ts"] + e["dur"] for e in (first, second)) - max(first["ts"], second["ts"])
        assert overlap > 0, "ranks have one clock, and run a step together"
    code, out, err = trace(tmp_path, "--compare", "after.json", "after.json", "--output", "both")
    assert code == 0, err
    assert out.count("step / bound") == 2
    assert (tmp_path / "both.html").stat().st_size > (tmp_path / "after.html").stat().st_size
    assert not (tmp_path / "both.json").exists()


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    for args in (("--phase", "both"), ("--compare", "none.json", "none.json"), ("--output", "no/such/folder")):
        code, _, err = trace(tmp_path, *args)
        assert code == 2
        assert err.startswith("hocket: ConfigError: ")
        assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def exposed_and_comm(recording: Recording) -> list[tuple[float, float]]:
    return [(one["exposed"], one["comm"]) for one in (figures.per_step_us() for figures in recording.figures())]


@pytest.mark.alone
def test_serial_communication_is_exposed(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    """Overlap off: over sockets all of it; over an emulated link where no shared experts are computed meanwhile."""
    work = Workload(phase="prefill", num_steps=3, prompt_len=64)
    for given in (options("tiny"), options(checkpoints("qwen3"), emulate_link_gb_per_s=0.02)):
        recording = record(given, work, group=groups.get(2))
        assert recording.num_ubatches == 1
        for exposed, comm in exposed_and_comm(recording):
            assert comm > 0
            assert exposed == pytest.approx(comm, rel=0.02)
        content = perfetto.to_json(recording)
        check_events(content)
        for rank in (0, 1):
            raw = figures_of(content, rank)
            assert raw["exposed"] == pytest.approx(raw["comm"], rel=0.02)


def test_decodes(groups: Groups, checkpoints: Callable[..., Path]) -> None:
    given = options(checkpoints("v2"), enable_dbo=True, dbo_decode_token_threshold=2)
    work = Workload(phase="decode", num_steps=3, skip=2, requests_per_rank=4, prompt_len=8)
    recording = record(given, work, group=groups.get(2))
    assert [len(steps) for steps in recording.ranks] == [3, 3]
    for step in (step for steps in recording.ranks for step in steps):
        assert (step.phase, step.num_tokens, step.num_ubatches) == ("decode", 4, 2)
        assert step.hand_overs
    lower, upper = bounds(*([steps] for steps in recording.ranks))
    assert -1e9 < lower <= 0 <= upper < 1e9, "of one clock, whatever the ranks waited for each other"
    assert recording.notes == []
    with pytest.raises(HocketError, match="no prefill step was run on every rank after the first 9"):
        record(options("tiny"), Workload(phase="prefill", num_steps=1, skip=9, prompts=("In",)), group=groups.get(2))
