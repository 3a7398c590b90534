"""The benchmarks on two GPUs: rates and kernels are measured there, and the result names the GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_checks import check_events, figures_of

ROOT = Path(__file__).resolve().parents[2]
SHAPE = str(ROOT / "benchmarks" / "shapes" / "deepseek-v2-lite")
COMMON = ("--model", SHAPE, "--load-format", "dummy", "--data-parallel-size", "2", "--enable-expert-parallel")


def hocket(*args: str) -> str:
    """What a command prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "hocket.cli.main", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout.rpartition("\n{")[0], done.stderr)
    return done.stdout


def report_of(verb: str, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hocket("bench", verb, *COMMON, *args).splitlines()[-1])
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


FEW = ("--num-layers", "3", "--num-dense-layers", "0", "--slice-of-ep", "8", "--context", "256", "--repeats", "2")
STRATEGIES = ("--strategies", "serial,dual_batch", "--max-num-batched-tokens", "1024", "--tokens-per-gpu", "32")
RATES = ("--bytes-per-s", "4.3e12", "--flops-per-s", "7.8e14")
LINK_US = 500.0


@pytest.mark.parametrize("transport", ["allgather_reducescatter", "torch"])
def test_each_lane_of_a_split_step_alone(transport: str) -> None:
    link = ("--emulate-link-gb-per-s", "10", "--emulate-link-latency-us", str(LINK_US), "--enforce-eager")
    rows = report_of("step", *FEW, *STRATEGIES, *RATES, *link, "--all2all-backend", transport)["rows"]
    assert [(row["phase"], row["strategy"]) for row in rows] == [
        (phase, strategy) for phase in ("decode", "prefill") for strategy in ("serial", "dual_batch")
    ]
    for row in rows:
        serial = row["strategy"] == "serial"
        assert not row["lanes"]["graphs"]
        for name, count in (("comm", 3 * 2), ("comm_halves", 3 * 2 * 2)):
            link_us = row["lanes"]["bytes"][name] / 10e3 + count * LINK_US
            assert link_us <= row[f"{name}_us"] <= 1.5 * link_us, name
        assert row["output_us"] < row["compute_us"] <= 1.2 * row["serial_us"]
        assert row["exposed_from"] == "profile"
        assert 0 < row["kernels"]["exposed_comm_us"] <= row["kernels"]["comm_us"] * 1.001
        if serial:  # beside it are the shared experts alone
            assert row["exposed_comm_us"] >= 0.5 * row["comm_us"]
        else:
            assert row["step_us"] >= 0.9 * row["bound_us"]


def test_lanes_of_decodes_are_captured() -> None:
    rows = report_of("step", *FEW, *STRATEGIES, *RATES, "--phase", "decode", "--cudagraph-capture-sizes", "32")["rows"]
    row = rows[0]
    assert (row["strategy"], row["graphs"], row["lanes"]["graphs"]) == ("serial", True, True)
    assert 0 < row["output_us"] < row["compute_us"] <= row["compute_halves_us"] * 1.1
    assert row["compute_us"] + row["comm_us"] <= 2 * row["step_us"]


def traced(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What a trace's file holds. Its events hold together, and its figures are those of its kernels."""
    out = hocket("trace", *COMMON, *arguments, "--num-steps", "2", "--output", str(tmp_path / "trace"))
    content: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    assert "times are those of kernels, by torch's profiler" in out, out
    check_events(content)
    for rank, figures in enumerate(content["otherData"]["figures_us"]):
        for name, value in figures_of(content, rank).items():
            assert figures[name] == pytest.approx(value, rel=0.02, abs=0.1), (rank, name)
        assert 0 < figures["comm"] < figures["step"], figures
        assert 0 < figures["compute"] < figures["step"], figures
    slices = [event for event in content["traceEvents"] if event.get("cat") in ("compute", "comm")]
    assert all(event["args"]["kernel"] for event in slices)
    return content


def test_a_trace_is_of_kernels_by_stage(tmp_path: Path) -> None:
    link = ("--emulate-link-gb-per-s", "10")
    content = traced(tmp_path, "--enable-dbo", "--dbo-prefill-token-threshold", "64", "--prompt-len", "1024", *link)
    for figures in content["otherData"]["figures_us"]:
        assert 0 < figures["hidden"] < figures["comm"], figures
    names = {event["name"] for event in content["traceEvents"]}
    for ubatch in (0, 1):
        for stage in ("attn", "experts", "dispatch send", "combine send"):
            assert f"ub{ubatch} {stage}" in names, sorted(names)
    kernels = {e["args"]["kernel"] for e in content["traceEvents"] if e.get("cat") == "comm"}
    assert any(kernel.startswith("Memcpy HtoD") for kernel in kernels), f"the emulated link's: {kernels}"


def test_a_trace_of_replayed_graphs(tmp_path: Path) -> None:
    """Their kernels on two lanes, layer by layer."""
    sizes = ("--phase", "decode", "--requests-per-rank", "32", "--cudagraph-capture-sizes", "32")
    content = traced(tmp_path, "--all2all-backend", "allgather_reducescatter", *sizes)
    assert any("replays of CUDA graphs" in note for note in content["otherData"]["notes"]), content["otherData"]
    assert {event["args"]["stage"] for event in content["traceEvents"] if event.get("cat") == "compute"} == {"K"}
    layers = {event["args"]["layer"] for event in content["traceEvents"] if event.get("cat") == "comm"}
    assert len(layers) > 1, "as many transfers in each"
