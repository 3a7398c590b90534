"""What every benchmark's result says about where it comes from. Knows no benchmark."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.config.devices import num_gpus
from hocket.config.engine import EngineConfig
from hocket.errors import ConfigError

UNKNOWN = "unknown"
PACKAGES = ("hocket", "torch", "numpy", "tokenizers")
GPU_PACKAGES = ("triton", "flashinfer-python", "sgl-deep-gemm")
"""Named where they are installed."""
_DRIVER = Path("/proc/driver/nvidia/version")


def provenance(bench: str) -> dict[str, Any]:
    """Bench, command, commit, date, hardware and versions of this run."""
    return {
        "bench": bench,
        "command": _command(sys.argv[1:]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()},
        "versions": {name: package_version(name) or UNKNOWN for name in PACKAGES}
        | {name: version for name in GPU_PACKAGES if (version := package_version(name))}
        | {"python": platform.python_version()},
    }


def _command(words: list[str]) -> str:
    """As it was typed, less what is nobody else's business: results are kept and shown."""
    shown = ["hocket", *words]
    for i, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=…"
        elif shown[i - 1] == "--api-key":
            shown[i] = "…"
    return " ".join(shown)


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def strategy_of(config: EngineConfig) -> str:
    """How a step is run: "off", or the number of ubatches it may be split into."""
    num_ubatches = config.overlap.num_ubatches
    return "off" if num_ubatches == 1 else f"{num_ubatches} ubatches"


def link_of(config: EngineConfig) -> dict[str, Any]:
    """What transfers go over; of a real link nothing is known here but that it is real.

    *_bytes_per_token: where the emulated link counts those instead of the bytes that are sent.
    """
    link = config.parallel.emulated_link
    if link is None:
        return {"kind": "real", "gb_per_s": None, "latency_us": None}
    found = {"kind": "emulated", "gb_per_s": link.gb_per_s, "latency_us": link.latency_us}
    if link.token_bytes is not None:
        out, back = link.token_bytes
        found |= {"dispatch_bytes_per_token": out, "combine_bytes_per_token": back}
    return found


def runs_in_fp8(info: Mapping[str, Any]) -> bool:
    """Whether the rank whose start-up facts these are holds its experts, and so its projections, in fp8."""
    return "fp8" in info["moe_backend"]


def check_output(output: str | None) -> None:
    """Raise ConfigError where `output` cannot be written, before anything is measured. Neither makes a file nor changes
    one: a run that fails has no result."""
    if output is None:
        return
    is_new = not os.path.lexists(output)
    try:
        with Path(output).open("a", encoding="utf-8"):
            pass
        if is_new:
            Path(output).unlink()
    except OSError as error:
        raise ConfigError("output", output, f"a file that can be written ({error.strerror})") from None


def emit(report: dict[str, Any], output: str | None) -> None:
    """Print the report as the last line, and write it to `output` if given. JSON has no infinities and no NaN: null."""
    report = _finite(report)
    print(json.dumps(report))
    if output is not None:
        Path(output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with None for numbers that are none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _commit() -> str:
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of each NVIDIA GPU that torch sees; [] where there is none."""
    if not num_gpus():
        return []
    import torch

    driver = kernel_driver_version() or UNKNOWN
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory, "driver": driver} for gpu in found]


def kernel_driver_version() -> str | None:
    """Of the NVIDIA kernel module: `NVRM version: NVIDIA UNIX … Kernel Module  580.65.06  Release Build …`; None where
    there is none or it does not say."""
    try:
        line = _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", line)
    return found[0] if found else None


def package_version(name: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
