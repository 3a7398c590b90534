"""Rank processes whose KV caches and unset memory are full of NaN (see patched_ranks.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAN_BYTE = 0xFF
"""As bf16, fp16 and fp32 NaN, as int32 -1."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]


def install() -> None:
    """From now on; a rank's info says under "spoilt" how many caches and other tensors were."""
    import torch.distributed._symmetric_memory as symmetric

    from hocket.worker import runner

    counts = {"caches": 0, "tensors": 0}
    for owner, name in WAYS:
        setattr(owner, name, _spoiling(getattr(owner, name), counts))
    allocate, info, shared = runner.allocate_kv_caches, runner.Runner.info, symmetric.empty

    def shared_spoilt(*size: Any, **kwargs: Any) -> Tensor:
        """Before other ranks know of it."""
        made: Tensor = shared(*size, **kwargs)
        made.view(torch.uint8).fill_(NAN_BYTE)
        torch.cuda.synchronize(made.device)
        counts["tensors"] += 1
        return made

    def allocate_spoilt(*args: Any) -> list[Tensor]:
        caches = allocate(*args)
        for cache in caches:
            cache.fill_(torch.nan)
        counts["caches"] += len(caches)
        return caches

    runner.allocate_kv_caches = allocate_spoilt
    symmetric.empty = shared_spoilt
    runner.Runner.info = lambda self: info(self) | {"spoilt": dict(counts)}  # type: ignore[method-assign]


def _spoiling(make: Callable[..., Tensor], counts: dict[str, int]) -> Callable[..., Tensor]:
    """`make`, whose result holds NaN; inside a CUDA graph each time that it runs."""

    @functools.wraps(make)
    def spoilt(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        if made.dtype in DTYPES and made.device.type != "meta":
            made.fill_(torch.nan)
            counts["tensors"] += 1
        return made

    return spoilt
