"""What every benchmark's result says about where it comes from. Knows no benchmark."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from hocket.errors import ConfigError


def provenance(bench: str) -> dict[str, Any]:
    """Bench, command, commit, date, hardware and versions of this run."""
    return {
        "bench": bench,
        "command": " ".join(["hocket", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpus": []},
        "versions": {name: _version(name) for name in ("hocket", "torch", "numpy", "tokenizers")}
        | {"python": platform.python_version()},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def check_output(output: str | None) -> None:
    """Raise ConfigError where `output` cannot be written, before anything is measured."""
    if output is None:
        return
    try:
        with Path(output).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError("output", output, f"a file that can be written ({error.strerror})") from None


def emit(report: dict[str, Any], output: str | None) -> None:
    """Print the report as the last line, and write it to `output` if given."""
    print(json.dumps(report))
    if output is not None:
        Path(output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
