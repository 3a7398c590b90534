"""Where a result comes from: GPUs with their driver, and the packages whose kernels ran."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hocket.bench import report
from hocket.errors import ConfigError

PROC = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\nGCC version:  gcc 13\n"
)


def test_gpus_and_their_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(report, "_DRIVER", driver)
    monkeypatch.setattr(report, "num_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [SimpleNamespace(name="NVIDIA H200", total_memory=150 << 30), SimpleNamespace(name="Other", total_memory=1)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])
    for text, said in ((PROC, "580.95.05"), ("no number", "unknown"), ("", "unknown"), (None, "unknown")):
        driver.unlink(missing_ok=True)
        if text is not None:
            driver.write_text(text)
        assert report.provenance("step")["hardware"]["gpus"] == [
            {"name": "NVIDIA H200", "memory_bytes": 150 << 30, "driver": said},
            {"name": "Other", "memory_bytes": 1, "driver": said},
        ]


@pytest.mark.parametrize("given", [["--api-key", "secret"], ["--api-key=secret"]])
def test_a_key_is_not_written_into_results(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["hocket", "bench", "serve", *given, "--repeats", "4"])
    command = report.provenance("serve")["command"]
    assert command.startswith("hocket bench serve --api-key")
    assert command.endswith("… --repeats 4")
    assert "secret" not in command


def test_packages_of_kernels_are_named_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "flashinfer-python":
            raise importlib.metadata.PackageNotFoundError(name)
        return f"{name} 1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = report.provenance("step")["versions"]
    assert found["triton"] == "triton 1.0"
    assert found["sgl-deep-gemm"] == "sgl-deep-gemm 1.0"
    assert "flashinfer-python" not in found
    assert found["torch"] == "torch 1.0"


def test_looking_whether_a_result_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    fresh, older = tmp_path / "fresh.json", tmp_path / "older.json"
    older.write_text("a result")
    for path in (fresh, older):
        report.check_output(str(path))
    assert not fresh.exists(), "a run that fails after this has no result"
    assert older.read_text() == "a result"
    with pytest.raises(ConfigError, match="Not a directory"):
        report.check_output(str(older / "below.json"))


def test_results_are_json_that_all_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    file = tmp_path / "result.json"
    report.emit({"rows": [{"largest": math.inf, "at": (1, math.nan)}], "us": 2.5}, str(file))
    for text in (capsys.readouterr().out, file.read_text()):
        assert json.loads(text, parse_constant=refuse) == {"rows": [{"largest": None, "at": [1, None]}], "us": 2.5}
