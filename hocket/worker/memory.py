"""How many KV-cache blocks a rank gets. Knows nothing of what the blocks hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hocket.config.engine import EngineConfig
from hocket.errors import CapacityError

_FALLBACK_BYTES = 4 << 30
_MORE = "--max-num-batched-tokens, or raise --gpu-memory-utilization"
"""What else leaves the cache more than it found: the largest step takes its buffers first, those of transfers too."""


def available_bytes(device: torch.device) -> int:
    """Free memory of the device in bytes; on a CPU what the operating system could hand out without swapping, and
    what the limits of this process's container leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_bytes(Path("/"))


def host_bytes(root: Path) -> int:
    """Of a file system tree with proc/ and sys/: the smallest of MemAvailable and what each memory cgroup leaves."""
    found = list(_cgroups_left(root))
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return max(0, min(found, default=_FALLBACK_BYTES))


def _cgroups_left(root: Path) -> Iterator[int]:
    """Bytes that the limit of each cgroup around this process leaves; the page cache it could drop counts as free.

    A limit holds for all cgroups below, so all ancestors are looked at; of a container's own, only those it can see.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":  # version 2
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top) and (left := _left(folder, *names)) is not None:
                yield left


def _left(folder: Path, limit_name: str, usage_name: str, droppable: str) -> int | None:
    """Bytes left in one cgroup, None where it has no limit."""
    limit, usage = (next(iter(_lines(folder / name)), "") for name in (limit_name, usage_name))
    if not (limit.isdecimal() and usage.isdecimal()):  # "max", or no such file
        return None
    cached = [line.split()[1] for line in _lines(folder / "memory.stat") if line.split()[:1] == [droppable]]
    return int(limit) - int(usage) + sum(map(int, cached))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []


def num_cache_blocks(config: EngineConfig, block_bytes: int, free_bytes: int, num_local_ranks: int) -> int:
    """Blocks of `block_bytes` (all layers together) for one rank.

    `free_bytes` is shared by `num_local_ranks`. More than every running request at full length can use is not taken.

    Raises:
        CapacityError: not even one request of max_model_len fits; needed and available bytes and what to change.
    """
    block_size = config.cache.block_size
    per_request = -(-config.scheduler.max_model_len // block_size)
    budget = config.cache.memory_bytes
    if budget is None:
        budget = int(free_bytes * config.cache.memory_utilization) // num_local_ranks
        budget = min(budget, per_request * config.scheduler.max_num_seqs * block_bytes)
    blocks = budget // block_bytes
    if blocks < per_request:
        raise CapacityError(
            f"the KV cache has room for {blocks} blocks ({budget:,} bytes), but one request of max_model_len "
            f"{config.scheduler.max_model_len} needs {per_request} ({per_request * block_bytes:,} bytes): "
            f"lower --max-model-len or {'raise --kv-cache-memory-bytes' if config.cache.memory_bytes else _MORE}"
        )
    return blocks
