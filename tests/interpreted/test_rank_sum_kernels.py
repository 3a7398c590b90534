"""Sums of ranks in Triton's interpreter: those of PyTorch in fp32, rounded once, and nothing read that was not sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.launch import Launch
from hocket.moe.transport import rank_sum_kernels
from hocket.moe.transport.rank_sums import add_ranks

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7}
"""The interpreter cuts off what a GPU rounds."""


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (3, 1), (4, 3)])
@pytest.mark.parametrize(("num_rows", "padded"), [(0, 0), (0, 2), (3, 3), (5, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(num_ranks: int, rank: int, num_rows: int, padded: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    own = torch.randn(padded, 300, generator=generator).to(dtype)
    parts = torch.randn(num_ranks, padded, 300, generator=generator).to(dtype)
    parts[rank] = torch.nan
    parts[:, num_rows:] = torch.nan
    found = torch.full((num_rows, 300), torch.nan).to(dtype)
    rank_sum_kernels.add_ranks(found, own, parts, rank)
    torch.testing.assert_close(found, add_ranks(own, parts, rank, num_rows), atol=0, rtol=ROUNDING[dtype])
    assert found.isfinite().all()


def test_steps_of_other_sizes_need_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would be compiled in the middle of serving."""
    constants = []

    def launch(kernel: Any, grid: tuple[int, ...], *numbers: float, **others: Any) -> Launch:
        constants.append(others)
        return Launch(kernel, grid, *numbers, **others)

    monkeypatch.setattr(rank_sum_kernels, "Launch", launch)
    for num_rows in (4, 6, 7):
        rank_sum_kernels.add_ranks(
            torch.empty(num_rows - 1, 16), torch.zeros(num_rows, 16), torch.zeros(2, num_rows, 16), 0
        )
    assert len(constants) == 3
    assert constants[0] == constants[1] == constants[2]
