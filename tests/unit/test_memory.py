"""How much memory there is: the machine's, and what a container's limits leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hocket.worker.memory import available_bytes, host_bytes

GB = 1 << 30
V1_UNLIMITED = 9223372036854771712


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup{folder}"
    stat = f"anon 5\ninactive_file {cache}\n"
    return {f"{top}/memory.max": f"{limit}\n", f"{top}/memory.current": f"{usage}\n", f"{top}/memory.stat": stat}


def v1(folder: str, limit: int, usage: int) -> dict[str, str]:
    top = f"sys/fs/cgroup/memory{folder}"
    return {f"{top}/memory.limit_in_bytes": f"{limit}\n", f"{top}/memory.usage_in_bytes": f"{usage}\n"}


MEMINFO = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GB // 1024} kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 8 * GB),
        ({}, 4 * GB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", str(3 * GB), GB), 2 * GB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", str(3 * GB), 2 * GB, GB), 2 * GB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", "max", GB), 8 * GB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", str(64 * GB), GB), 8 * GB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n"} | v2("", str(GB), 2 * GB), 0),
        # A limit holds for what is below it.
        (MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2("/a", str(5 * GB), GB) | v2("/a/b", "max", GB), 4 * GB),
        (MEMINFO | {"proc/self/cgroup": "3:cpu:/x\n2:memory,hugetlb:/a\n"} | v1("/a", 3 * GB, GB), 2 * GB),
        # A version 1 container is told its path on the host, and sees its own limit at the top.
        (MEMINFO | {"proc/self/cgroup": "2:memory:/docker/x\n"} | v1("", 3 * GB, GB), 2 * GB),
        (MEMINFO | {"proc/self/cgroup": "2:memory:/a\n"} | v1("/a", V1_UNLIMITED, GB), 8 * GB),
    ],
)
def test_the_smallest_of_all_limits(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert host_bytes(write(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    assert 1 << 20 < available_bytes(torch.device("cpu")) < 1 << 50
