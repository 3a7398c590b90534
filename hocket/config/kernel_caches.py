"""Where libraries keep the kernels that they compile, so that the next start need not. Torch-free, and imports none."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def kernel_caches() -> dict[str, Path]:
    """By importable package, of those that compile as a GPU runs: the folder, as each one's own variables say it."""
    home = Path.home()
    triton_home, flashinfer_base = (os.environ.get(name, home) for name in ("TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"))
    found = {
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or Path(triton_home, ".triton", "cache")),
        "flashinfer": Path(flashinfer_base, ".cache", "flashinfer"),
        "deep_gemm": Path(os.environ.get("DG_JIT_CACHE_DIR") or home / ".deep_gemm"),
    }
    return {name: folder for name, folder in found.items() if importlib.util.find_spec(name) is not None}


def caches_text(device: str) -> str:
    """For the end of the line that says what runs; "" where nothing is compiled."""
    folders = [] if device == "cpu" else [str(folder) for folder in kernel_caches().values()]
    return f"; what was compiled is kept for the next start in {', '.join(folders)}" if folders else ""
