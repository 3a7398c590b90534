"""Makes every package that Hocket can do without look as if it were not installed. For tests only."""

from __future__ import annotations

import sys

OPTIONAL = (
    "cutlass",
    "deep_ep",
    "deep_gemm",
    "fastapi",
    "flash_attn",
    "flashinfer",
    "fla",
    "greenlet",
    "nvshmem",
    "prometheus_client",
    "pytest",
    "transformers",
    "triton",
    "uvicorn",
    "vllm",
    "xformers",
)


def block() -> None:
    """In a fresh process: importing any of them raises ImportError."""
    for name in OPTIONAL:
        sys.modules[name] = None  # type: ignore[assignment]
