"""Every way to get memory that hocket's kernels use gives spoilt memory in these tests (see conftest)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

WAYS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "empty": lambda dtype: torch.empty(2, 3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(2, 6, dtype=dtype)[:, :3]),
    "new_empty": lambda dtype: torch.zeros(1).new_empty(2, 3, dtype=dtype),
}


@pytest.mark.parametrize("way", WAYS)
def test_unset_memory_is_spoilt(way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert WAYS[way](dtype).float().isnan().all()
    for dtype in (torch.int32, torch.int64):
        assert (WAYS[way](dtype) == torch.iinfo(dtype).max).all()
