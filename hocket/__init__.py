"""Hocket: inference for mixture-of-experts models with data-parallel attention and expert-parallel experts.

Import direction (tested): cli → server → explain → doctor, verify → bench → llm, rank, metrics → client, observe →
engine → worker → overlap → models → moe, attention, layers → quant → host, launch, ubatch → dist. Leaves: errors, envs,
config, request, outputs, progress, startup.
Nothing torch is imported until a rank needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.llm import LLM
    from hocket.outputs import CompletionOutput, Logprob, RequestOutput
    from hocket.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "hocket.llm",
    "SamplingParams": "hocket.request",
    "RequestOutput": "hocket.outputs",
    "CompletionOutput": "hocket.outputs",
    "Logprob": "hocket.outputs",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import hocket` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
