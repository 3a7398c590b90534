"""What `hocket doctor` says of packages, GPUs, backends and models, part by part; test_doctor_command.py runs it."""

from __future__ import annotations

import io
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make

from hocket.bench import report
from hocket.config import backends as names
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist.mesh import Mesh
from hocket.doctor import children, choice, examine, host
from hocket.doctor.backends import backends
from hocket.doctor.children import Outcome
from hocket.doctor.show import MAX_WIDTH, console, show
from hocket.models.backends import KERNELS
from hocket.models.registry import build_model
from hocket.moe.factory import MoEFactory
from hocket.moe.placement import ExpertPlacement

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-31\t0\n"
    "GPU1\tNV18\t X \tSYS\t0-31\t0\n"
    "NIC0\tPIX\tSYS\t X \t\t\n"
    "\nLegend:\n\n  X    = Self\n"
)


def config(**options: Any) -> Any:
    return resolve(Options.from_dict(options))


# -- packages and driver ---------------------------------------------------------------------------------------------


def test_required_packages_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.match(r"[\w-]+", line).group() for line in project["dependencies"]}  # type: ignore[union-attr]
    assert wanted == set(host.REQUIRED)
    assert not wanted & set(report.GPU_PACKAGES)


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(report, "_DRIVER", folder / "absent")


def test_links_and_driver_as_nvidia_smi_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topology").write_text(TOPOLOGY)
    answers = ("*uuid*) echo GPU-a; echo GPU-b", "*driver*) echo 580.95.05", f"*) cat {tmp_path}/topology")
    fake_smi(tmp_path, monkeypatch, f'case "$*" in {";; ".join(answers)};; esac')
    assert host.links_between_gpus() == {"GPU-a": {"GPU-b": "NV18"}, "GPU-b": {"GPU-a": "NV18"}}
    assert host.driver_version() == "580.95.05"


@pytest.mark.parametrize("script", ["exit 9", "exec sleep 100", "echo nonsense"])
def test_an_nvidia_smi_that_does_not_work(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(host, "_SMI_LIMIT_S", 0.5)
    assert host.links_between_gpus() == {}


def test_driver_version_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 12.2.0\n")
    monkeypatch.setattr(report, "_DRIVER", file)
    assert host.driver_version() == "580.95.05"


# -- backends --------------------------------------------------------------------------------------------------------


def found(**options: Any) -> dict[tuple[str, str], str | None]:
    return {(one["kind"], one["name"]): one["reason"] for one in backends(config(**options))}


def test_every_backend_of_every_registry_is_listed() -> None:
    wanted = {
        "attention": names.ATTENTION,
        "experts": names.EXPERTS,
        "transport": names.TRANSPORTS,
        "executor": names.EXECUTORS,
        "kernels": KERNELS,
    }
    reasons = found()
    assert set(reasons) == {(kind, name) for kind, group in wanted.items() for name in group}
    gpu_only = {("attention", "flashinfer"), ("kernels", "triton"), *(("experts", name) for name in names.GPU_EXPERTS)}
    gpu_only |= {("transport", name) for name in names.GPU_TRANSPORTS}
    assert {one for one, reason in reasons.items() if reason is not None} == gpu_only
    assert all("NVIDIA GPU" in str(reasons[one]) for one in gpu_only)


def test_a_backend_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hocket.attention.tiled", None)
    reasons = found()
    assert reasons["attention", "tiled"] is not None
    assert reasons["attention", "tiled"].startswith("ModuleNotFoundError: import of hocket.attention.tiled halted")
    assert reasons["attention", "sdpa"] is None


def test_a_backend_that_torch_lacks_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    reason = found()["experts", "grouped_mm"]
    assert reason is not None
    assert "has no torch.nn.functional.grouped_mm" in reason


def test_a_backend_that_cannot_run_the_models_widths_says_why(tmp_path: Path) -> None:
    path = make("v2", tmp_path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(re.sub(r'"moe_intermediate_size": \d+', '"moe_intermediate_size": 30', text))
    reason = found(model=str(path))["experts", "grouped_mm"]
    assert reason is not None
    assert "moe_intermediate_size" in reason


# -- what a model would come to --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["v2", "v3", "qwen3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_those_of_the_first_rank(tmp_path: Path, model: str, ranks: int) -> None:
    one = config(model=str(make(model, tmp_path)), data_parallel_size=ranks, enable_expert_parallel=ranks > 1)
    told = choice.choice(one, None)
    cpu, moe = torch.device("cpu"), one.model.moe
    placement = ExpertPlacement(moe.num_experts, ranks, one.parallel.expert_placement_strategy)
    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, ranks) if ranks > 1 else None
    mesh = Mesh(rank=0, world_size=ranks, device=cpu, ep_group=group)
    factory = MoEFactory(mesh, placement, one.parallel.all2all_backend, one.moe_backend)
    built = build_model(one.model, factory, cpu, getattr(torch, one.dtype))
    assert told["weights_bytes"] == sum(tensor.nbytes for tensor in (*built.parameters(), *built.buffers()))
    assert told["problems"] == []
    assert told["cache_blocks"] > 0


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = choice.choice(config(), None)["weights_bytes"]
    one_rank = config(data_parallel_size=2)
    assert choice.choice(one_rank, weights)["problems"] == [
        f"a rank's weights need {weights:,} bytes, and {weights:,} are free for each rank"
    ]
    (problem,) = choice.choice(one_rank, weights + 1000)["problems"]
    assert "one request of max_model_len" in problem
    monkeypatch.setattr(choice, "available_bytes", lambda _: 3 * weights)
    assert choice.choice(config(), None)["cache_blocks"] > 0
    (problem,) = choice.choice(config(data_parallel_size=3), None)["problems"]  # on a CPU ranks share the memory
    assert problem.startswith("a rank's weights need")


def test_files_that_would_not_load_are_said(tmp_path: Path) -> None:
    path = make("v2", tmp_path)
    assert choice.choice(config(model=str(path)), None)["problems"] == []
    for file in path.glob("*.safetensors"):
        file.unlink()
    (problem,) = choice.choice(config(model=str(path)), None)["problems"]
    assert "has no *.safetensors file" in problem
    assert choice.choice(config(model=str(path), load_format="dummy"), None)["problems"] == []


# -- all of it -------------------------------------------------------------------------------------------------------

GPU = {
    "name": "NVIDIA H200",
    "memory_bytes": 150 << 30,
    "free_bytes": 149 << 30,
    "num_sms": 132,
    "compute_capability": "9.0",
}


def measured(num_bytes: int, us: float) -> dict[str, Any]:
    return {
        "bytes": num_bytes,
        "us": {"median": us, "min": us, "max": us * 1.5},
        "gb_per_s": num_bytes / us / 1e3,
    }


def pretend(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Outcome], num_gpus: int = 0) -> list[str]:
    """The probes find this; returns the list of those that are run."""
    started: list[str] = []

    def run(module: str, arguments: Any, *, count: int = 1, limit_s: float, on_progress: Any) -> list[Outcome]:
        started.append(module)
        return [outcomes[module]] * count

    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(examine, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr("hocket.config.resolve.num_gpus", lambda: num_gpus)
    return started


def examined(links: bool = True, **options: Any) -> dict[str, Any]:
    given = Options.from_dict(options)
    return examine.examine(given, links=links, limit_s=5.0, on_progress=lambda _: None)


def shown(report: dict[str, Any]) -> str:
    out = io.StringIO()
    show(report, console(file=out))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    return "\n".join(line.rstrip() for line in lines)


CHOICE = {
    "attention": "sdpa",
    "experts": "grouped_mm",
    "kernels": "torch",
    "weights_bytes": 17 << 30,
    "free_bytes": 149 << 30,
    "cache_blocks": 1000,
    "cache_bytes": 4 << 30,
    "problems": [],
}


@pytest.mark.parametrize("count", [2, 8])
def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    copies = [{"from": a, "to": b, "link": "NV18", "peer_access": True} | measured(1 << 27, 350 + a) for a, b in pairs]
    reason = "it needs a package of a very long name that nobody would ever want to type " * 2
    survey = [
        {"versions": {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}, "gpus": [GPU] * count},
        {"backends": [{"kind": "experts", "name": "deep_gemm", "available": False, "reason": reason}]},
        {"choice": CHOICE},
    ]
    rows = [{"op": "all-to-all", "ranks": count} | measured(1 << 26, 261)]
    outcomes = {examine.SURVEY: Outcome(survey), examine.PEERS: Outcome(copies), examine.LINKS: Outcome(rows)}
    started = pretend(monkeypatch, outcomes, num_gpus=count)
    report = examined()
    assert started == [examine.SURVEY, examine.PEERS, examine.LINKS]
    assert report["problems"] == []
    assert report["config"]["device"] == "cuda"
    text = shown(report)
    assert text.count("NVIDIA H200, 150 GiB (149 free), 132 SMs, compute capability 9.0") == count
    assert ("0→1, 1→0, NVLink × 18, direct, 128 MiB: 350.0 – 351.0 µs" in text) == (count == 2)
    assert ("56 pairs, NVLink × 18, direct, 128 MiB: 350.0 – 357.0 µs" in text) == (count == 8)
    assert f"nccl, {count} ranks, 64 MiB: 261.0 µs, 257.12 GB/s" in text
    assert "✓ everything" in text


def test_one_gpu_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    started = pretend(monkeypatch, {examine.SURVEY: Outcome([{"gpus": [GPU], "choice": CHOICE}])}, num_gpus=1)
    assert "one GPU: nothing to measure" in shown(examined())
    assert started == [examine.SURVEY]


def test_gpus_that_torch_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {examine.SURVEY: Outcome([{"gpus": [GPU], "choice": CHOICE}])}, num_gpus=2)
    assert "torch finds 1 of the 2 GPUs of this host" in examined(links=False)["problems"]


def test_a_torch_that_fails_is_the_only_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    started = pretend(monkeypatch, {examine.SURVEY: Outcome([], error="ImportError: libcudart.so.13")}, num_gpus=2)
    report = examined()
    assert report["problems"] == ["torch: ImportError: libcudart.so.13"]
    assert started == [examine.SURVEY]
    assert "✗ torch: ImportError: libcudart.so.13" in shown(report)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    started = pretend(monkeypatch, {})
    monkeypatch.setattr(examine, "packages", lambda: host.packages() | {"torch": None, "pyzmq": None})
    report = examined()
    assert report["problems"] == ["torch is not installed", "pyzmq is not installed"]
    assert started == []
    assert "✗ torch is not installed" in shown(report)


@pytest.mark.parametrize("links", [True, False])
def test_links_are_measured_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    survey = Outcome([{"choice": CHOICE}])
    hangs = Outcome([], error="hangs: not done after 5 s, while joining the group of ranks")
    started = pretend(monkeypatch, {examine.SURVEY: survey, examine.LINKS: hangs})
    report = examined(links=links)
    assert (examine.LINKS in started) == links
    assert bool(report["problems"]) == links
    if links:
        assert "gloo), process 0 of 2: hangs: not done after 5 s, while joining the group" in " ".join(
            report["problems"]
        )


def test_a_tokenizer_is_asked_for_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, {examine.SURVEY: Outcome([{"choice": CHOICE}])})
    path = make("v2", tmp_path)
    (problem,) = examined(links=False, model=str(path))["problems"]
    assert problem.startswith("tokenizer: ")
    assert examined(links=False, model=str(path), skip_tokenizer_init=True)["problems"] == []
