"""Rows that come expert by expert, in Triton's interpreter: where they stand, and experts against plain ones."""

from __future__ import annotations

import pytest
import torch
from test_expert_kernels import _plain_deep_gemm as _plain_deep_gemm
from test_expert_kernels import with_reference

from hocket.moe.experts import deep_gemm, groups
from hocket.moe.experts.base import Experts
from hocket.moe.experts.deep_gemm import DeepGemmExperts
from hocket.moe.experts.triton_grouped import TritonGroupedExperts
from hocket.moe.grouped import GroupedRows

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of numpy, about the interpreter
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # where nothing is
]
COUNTS = [(3, 0, 32, 17), (0, 0, 0, 0), (32, 32, 32, 32), (0, 0, 0, 1), (16, 0, 0, 0)]


def grouped(counts: tuple[int, ...], width: int, of_expert: int = 32) -> GroupedRows:
    """NaN where there is no row."""
    x = torch.full((len(counts), of_expert, width), torch.nan)
    for expert, count in enumerate(counts):
        x[expert, :count] = torch.randn(count, width)
    taken = torch.tensor(counts, dtype=torch.int32)
    return GroupedRows(x=x, counts=taken, max_rows=len(counts) * of_expert, expected_rows=sum(counts) / len(counts))


@pytest.mark.parametrize("counts", [*COUNTS, tuple(range(31)), (5,) * 70])
def test_places_are_those_that_plain_code_finds(counts: tuple[int, ...]) -> None:
    rows = grouped(counts, 1)
    expert, place = rows.taken()
    expected = place.masked_fill(expert < 0, -1)
    places = groups.places_of_groups(rows)
    assert places.place_of_slot.tolist() == expected.tolist()
    assert places.num_places == rows.x.shape[0] * rows.x.shape[1]


@pytest.mark.parametrize("counts", [*COUNTS, tuple(range(31)), (5,) * 70])
def test_tiles(counts: tuple[int, ...]) -> None:
    """Of 16 rows, in a table that says whose each is and how many rows it has."""
    tiles = groups.tiles_of_groups(grouped(counts, 1), 16)
    table: list[int] = []
    listed: list[int] = []
    sizes: list[int] = []
    for expert, count in enumerate(counts):
        for first in range(0, count, 16):
            size = min(16, count - first)
            table.append(expert)
            sizes.append(size)
            listed += [expert * 32 + first + i if i < size else -1 for i in range(16)]
    assert int(tiles.num_tiles) == len(table) <= tiles.max_tiles
    left = tiles.max_tiles - len(table)
    assert tiles.expert_of_tile.tolist() == table + [-1] * left
    assert tiles.rows_of_tile.tolist() == sizes + [0] * left
    assert tiles.slot_of_place.tolist() == listed + [-1] * 16 * left


@pytest.mark.usefixtures("_plain_deep_gemm")
@pytest.mark.parametrize("kind", [TritonGroupedExperts, DeepGemmExperts])
@pytest.mark.parametrize("counts", COUNTS)
def test_experts(kind: type[Experts], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "MASKED_ALIGN", 32)
    experts, reference = with_reference(kind, 4, 40, 24)
    experts.num_sms = 2
    experts.num_experts, experts.local_id_of = 8, torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1, -1])
    rows = grouped(counts, 40)
    out = experts.forward_grouped(rows)
    expected = reference.forward_grouped(rows)
    assert out.shape == rows.x.shape
    for expert, count in enumerate(counts):
        torch.testing.assert_close(out[expert, :count], expected[expert, :count], atol=2e-6, rtol=1e-5)
