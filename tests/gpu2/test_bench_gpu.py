"""The benchmarks on two GPUs: rates and kernels are measured there, and the result names the GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SHAPE = str(ROOT / "benchmarks" / "shapes" / "deepseek-v2-lite")
COMMON = ("--model", SHAPE, "--load-format", "dummy", "--data-parallel-size", "2", "--enable-expert-parallel")


def report_of(verb: str, *args: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "hocket.cli.main", "bench", verb, *COMMON, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout.rpartition("\n{")[0])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_steps_with_kernels_and_measured_rates() -> None:
    shape = ("--num-layers", "3", "--slice-of-ep", "8", "--context", "256", "--max-num-batched-tokens", "1024")
    report = report_of("step", *shape, "--tokens-per-gpu", "8,32", "--repeats", "2", "--count-kernels")
    assert [gpu["name"] for gpu in report["hardware"]["gpus"]] == [torch.cuda.get_device_name(i) for i in range(2)]
    replays = [row["replay_us"] for row in report["rows"] if row["phase"] == "decode"]
    assert len(replays) == len(set(replays)) == 2, "each of its own graph"
    for row in report["rows"]:
        rates = row["floor"]["rates"]
        assert rates["source"] == "measured at start"
        assert 1e11 < rates["bytes_per_s"] < 1e14
        assert 1e13 < rates["flops_per_s"] < 1e16
        assert 0 < row["floor_us"] < row["step_us"], "nothing is faster than its floor"
        kernels = row["kernels"]
        assert row["kernels_per_step"] == kernels["per_step"] >= 3 * 5, "norms, projections, attention of three layers"
        assert 0 < kernels["nccl_us"] < kernels["us"]
        assert sum(us for _, _, us in kernels["slowest"]) <= kernels["us"] * 1.001
        assert row["comm_us"] is None, "transfers only join the GPU's queue: nothing measures them there"


def test_a_layer_in_graphs_and_without() -> None:
    sweep = ("--slice-of-ep", "8", "--tokens-per-gpu", "16", "--repeats", "2")
    rates = ("--bytes-per-s", "4.3e12", "--flops-per-s", "7.8e14")
    transports = ("--transports", "torch,allgather_reducescatter", "--experts", "grouped_mm,reference")
    rows = report_of("layer", *sweep, *rates, *transports)["rows"]
    assert [(row["transport"], row["experts"]) for row in rows] == [
        (transport, experts)
        for transport in ("torch", "allgather_reducescatter")
        for experts in ("grouped_mm", "reference")
    ]
    for row in rows:
        assert "router" not in row["eager_parts"]
        assert ("experts" in row["eager_parts"]) >= (row["experts"] == "reference"), "it reads ids on the host"
        assert ("dispatch" in row["eager_parts"]) == (row["transport"] == "torch")
        assert 0 < row["floor_us"] < row["experts_us"]["median"]
    eager = report_of("layer", *sweep, *rates, "--enforce-eager")["rows"]
    assert all(len(row["eager_parts"]) == 5 and not row["graphs"] for row in eager)
