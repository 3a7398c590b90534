"""`--trace FILE` on other commands: the first steps of what runs anyway, in files that hold together; results stay."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trace_checks import check_events, figures_of

from hocket.trace import perfetto

ROOT = Path(__file__).resolve().parents[2]
RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel")
SPLIT = ("--enable-dbo", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2")
PROMPTS = ("-p", "In the beginning", "-p", "It came to pass", "--max-tokens", "8", "--ignore-eos", "--temperature", "0")


def hocket(folder: Path, *args: str) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hocket.cli.main", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def content_of(path: Path) -> dict[str, Any]:
    """Of a trace whose figures and events are right and whose page is there."""
    found: dict[str, Any] = json.loads(path.read_text())
    check_events(found)
    for rank in (0, 1):
        for name, value in figures_of(found, rank).items():
            assert found["otherData"]["figures_us"][rank][name] == pytest.approx(value, rel=0.02, abs=0.01), name
    assert found["otherData"]["title"] in path.with_suffix(".html").read_text()
    return found


def steps_of(path: Path) -> list[tuple[str, int, int]]:
    """Phase, tokens and ubatches of rank 0's steps."""
    return [(step.phase, step.num_tokens, step.num_ubatches) for step in perfetto.read(path).ranks[0]]


def test_generate(tmp_path: Path) -> None:
    """The prompts' step and the first decodes, of one token on each rank; the answers are on standard output alone."""
    code, out, err = hocket(
        tmp_path, "generate", *PROMPTS, *RANKS, *SPLIT, "--trace", "run.json", "--trace-steps", "3", "--json"
    )
    assert code == 0, err
    assert len(json.loads(out)["outputs"]) == 2
    content = content_of(tmp_path / "run.json")
    assert content["otherData"]["title"].endswith("2 ubatches (greenlet): the first steps of generate")
    steps = steps_of(tmp_path / "run.json")
    assert [phase for phase, _, _ in steps] == ["prefill", "decode", "decode"]
    assert steps[0][2] == 2
    assert steps[1:] == [("decode", 1, 1)] * 2, "below the threshold"
    exposed, comm = re.search(r"hocket: 3 steps of .* exposed comm ([\d.]+) of ([\d.]+) ms", err).groups()  # type: ignore[union-attr]
    assert 0 < float(exposed) <= float(comm)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.html"}


def test_bench_step_has_one_for_each_cell_and_strategy(tmp_path: Path) -> None:
    sizes = ("--tokens-per-gpu", "4", "--context", "24", "--num-steps", "6", "--max-num-batched-tokens", "64")
    few = ("--num-prefill-steps", "4", "--repeats", "1", "--trace", "cells", "--trace-steps", "2")
    code, out, err = hocket(tmp_path, "bench", "step", *RANKS, "--strategies", "serial,dual_batch", *sizes, *few)
    assert code == 0, err
    expected = {
        f"cells-{phase}-{tokens}-{strategy}": [(phase, tokens, num_ubatches)] * 2
        for phase, tokens in (("decode", 4), ("prefill", 64))
        for strategy, num_ubatches in (("serial", 1), ("dual_batch", 2))
    }
    assert len(json.loads(out.splitlines()[-1])["rows"]) == len(expected)
    files = {f"{name}.{ending}" for name in expected for ending in ("json", "html")}
    assert {path.name for path in tmp_path.iterdir()} == files
    for name, steps in expected.items():
        content_of(tmp_path / f"{name}.json")
        assert steps_of(tmp_path / f"{name}.json") == steps


def test_bench_throughput(tmp_path: Path) -> None:
    sizes = ("--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--repeats", "1", "--trace", "run.html")
    code, out, err = hocket(tmp_path, "bench", "throughput", *RANKS, *SPLIT, *sizes)
    assert code == 0, err
    content_of(tmp_path / "run.json")
    row = json.loads(out.splitlines()[-1])["rows"][0]
    assert row["steps_per_run"] == pytest.approx(4, abs=2), "the run that was recorded is not among the measured ones"
    assert [phase for phase, _, _ in steps_of(tmp_path / "run.json")] == ["prefill", "decode", "decode", "decode"]


def test_where_no_step_ran_on_every_rank_the_answers_stay(tmp_path: Path) -> None:
    """Replicas: one prompt keeps one of them busy."""
    few = ("-p", "In the beginning", "--max-tokens", "2", "--data-parallel-size", "2", "--trace", "run")
    code, out, err = hocket(tmp_path, "generate", *few)
    assert code == 0, err
    assert "In the beginning▸" in out
    why = "no step that could be recorded was run on every rank; give more or longer prompts"
    assert f"hocket: no run.html: {why}" in err
    assert not list(tmp_path.iterdir())


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    for args in (("--trace", "no/such/folder"), ("--trace", "run", "--trace-steps", "0")):
        code, _, err = hocket(tmp_path, "generate", "-p", "In", *args)
        assert code == 2
        assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
