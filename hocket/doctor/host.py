"""What can be said of this host without torch: packages, processors. Knows nothing of GPUs but what the driver says."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from hocket.bench.report import GPU_PACKAGES, cpu_name, kernel_driver_version, package_version

REQUIRED = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "typer",
    "rich",
    "pyzmq",
    "msgspec",
    "pyyaml",
    "greenlet",
)
"""pyproject.toml's dependencies."""
_SMI_LIMIT_S = 10


def packages() -> dict[str, str | None]:
    """Version of each package that Hocket needs or can use, None where it is not installed."""
    return {name: package_version(name) for name in (*REQUIRED, *GPU_PACKAGES)}


def processors() -> dict[str, Any]:
    """The processor's name, and how many of its threads this process may use."""
    return {"name": cpu_name(), "threads": len(os.sched_getaffinity(0))}


def driver_version() -> str | None:
    """Of the NVIDIA driver, None where there is none or it does not say."""
    if found := kernel_driver_version():
        return found
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return lines[0].strip() if lines else None


def gpu_free_bytes() -> int | None:
    """Free memory of the fullest GPU, None where there is none or it does not say. Starts no CUDA."""
    lines = _nvidia_smi("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    mebibytes = [int(line) for line in lines if line.strip().isdecimal()]
    return min(mebibytes) << 20 if mebibytes else None


def links_between_gpus() -> dict[str, dict[str, str]]:
    """What joins two GPUs, by their UUIDs, as `nvidia-smi topo -m` names it ("NV18": 18 NVLinks; "PIX", "PXB", "PHB",
    "NODE", "SYS": PCIe, ever farther). Empty where it cannot be told."""
    uuids = [line.strip() for line in _nvidia_smi("--query-gpu=uuid", "--format=csv,noheader")]
    return _topology(_nvidia_smi("topo", "-m"), uuids)


def _topology(lines: list[str], uuids: list[str]) -> dict[str, dict[str, str]]:
    rows = [[cell.strip() for cell in re.sub(r"\x1b\[\d*m", "", line).split("\t")] for line in lines]
    header = next((row for row in rows if row[1:2] == ["GPU0"]), [])
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if row is header or not re.fullmatch(r"GPU\d+", row[0]):
            continue
        number = int(row[0][3:])
        cells = dict(zip(header, row, strict=False))
        if number < len(uuids):
            found[uuids[number]] = {
                uuid: cells[f"GPU{other}"]
                for other, uuid in enumerate(uuids)
                if other != number and cells.get(f"GPU{other}")
            }
    return found


def _nvidia_smi(*arguments: str) -> list[str]:
    """Lines that it prints; none where it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
