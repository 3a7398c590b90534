"""What processes hold, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def held(pid: int | str = "self") -> tuple[int, int]:
    """Threads and file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
