"""Which devices this host has, found out without torch. Knows nothing of what runs on them."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

DEVICES = ("cpu", "cuda")
_DEV = Path("/dev")


def num_gpus() -> int:
    """NVIDIA GPUs that CUDA programs started by this process would see; 0 where the installed torch has no CUDA."""
    if "+cpu" in importlib.metadata.version("torch"):
        return 0
    found = sum(1 for path in _DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = [name for name in visible.split(",") if name.strip()]
    if "-1" in chosen:  # CUDA stops at the first that does not exist
        chosen = chosen[: chosen.index("-1")]
    return min(len(chosen), found)
