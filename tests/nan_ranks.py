"""Rank processes whose KV caches and unset memory are full of NaN (see patched_ranks.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]


def install() -> None:
    """From now on; a rank's info says under "spoilt" how many caches and other tensors were."""
    from hocket.worker import runner

    counts = {"caches": 0, "tensors": 0}
    for owner, name in WAYS:
        setattr(owner, name, _spoiling(getattr(owner, name), counts))
    allocate, info = runner.allocate_kv_caches, runner.Runner.info

    def allocate_spoilt(*args: Any) -> list[Tensor]:
        caches = allocate(*args)
        for cache in caches:
            cache.fill_(torch.nan)
        counts["caches"] += len(caches)
        return caches

    runner.allocate_kv_caches = allocate_spoilt
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
