"""Permutation, grouped GEMMs and packing of rows in Triton's interpreter, against plain calculations in fp32.

DeepGEMM's products are plain ones here, but as it does they take whole tiles, with whatever lies beside the rows.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch import Tensor

from hocket.moe.experts import deep_gemm, permute
from hocket.moe.experts.base import Experts
from hocket.moe.experts.deep_gemm import DeepGemmExperts
from hocket.moe.experts.reference import ReferenceExperts
from hocket.moe.experts.tile_config import GemmConfig, TileConfig
from hocket.moe.experts.triton_grouped import TritonGroupedExperts, grouped_mlp
from hocket.moe.transport import pack_kernels
from hocket.moe.transport.rows import RowFormat

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of numpy, about the interpreter
    pytest.mark.filterwarnings(
        "ignore:(invalid value|overflow) encountered:RuntimeWarning"
    ),  # in rows that padding has
]
DEEP_GEMM_TILE = 16
"""Rows."""


def random_ids(num_rows: int, top_k: int, num_experts: int, seed: int) -> Tensor:
    """int64 [N, K]: each expert at most once per row, a third dropped."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, max(num_experts, top_k), generator=generator)
    ids = scores.argsort(dim=1)[:, :top_k]
    ids[(ids >= num_experts) | (torch.rand(ids.shape, generator=generator) < 0.3)] = -1
    return ids


def slots_by_expert(ids: Tensor, num_experts: int) -> list[list[int]]:
    flat = ids.flatten().tolist()
    return [[slot for slot, expert in enumerate(flat) if expert == e] for e in range(num_experts)]


def with_reference(
    kind: type[Experts], num_experts: int, hidden_size: int, inter: int
) -> tuple[Experts, ReferenceExperts]:
    """Two in fp32 with the same random weights."""
    experts = kind(num_experts, hidden_size, inter, dtype=torch.float32)
    reference = ReferenceExperts(num_experts, hidden_size, inter, dtype=torch.float32)
    for mine, theirs in zip(experts.parameters(), reference.parameters(), strict=True):
        mine.copy_(torch.randn(mine.shape) * mine.shape[-1] ** -0.5)
        theirs.copy_(mine)
    return experts, reference


def contiguous(rows: Tensor, weight: Tensor, out: Tensor, ends: Tensor, use_psum_layout: bool = False) -> None:
    """ends: the place behind each expert's last row; whole tiles are multiplied, from a multiple of a tile on."""
    assert use_psum_layout
    assert len(ends) == len(weight)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        assert begin <= end <= len(rows)
        behind = -(-end // DEEP_GEMM_TILE) * DEEP_GEMM_TILE
        out[begin:behind] = rows[begin:behind] @ weight[expert].T
        begin = behind


def masked(rows: Tensor, weight: Tensor, out: Tensor, num_rows: Tensor, expected: int) -> None:
    assert expected > 0
    for expert, count in enumerate(num_rows.tolist()):
        whole = -(-count // DEEP_GEMM_TILE) * DEEP_GEMM_TILE
        out[expert, :whole] = rows[expert, :whole] @ weight[expert].T


@pytest.fixture
def _plain_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: DEEP_GEMM_TILE,
        m_grouped_bf16_gemm_nt_contiguous=contiguous,
        m_grouped_bf16_gemm_nt_masked=masked,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)


CASES = [(1, 1, 1), (5, 3, 4), (43, 3, 7), (150, 2, 40), (130, 1, 1)]


@pytest.fixture(params=[permute.FEW_SLOTS, 0], ids=["one_launch", "two_launches"])
def _launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How slots get their places."""
    monkeypatch.setattr(permute, "FEW_SLOTS", request.param)


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), [*CASES, (700, 3, 33)])
@pytest.mark.parametrize("told", ["tiles", "places", "ends"])
def test_tiles(num_rows: int, top_k: int, num_experts: int, told: Literal["tiles", "places", "ends"]) -> None:
    """Every expert's slots stand in their order in tiles of their own, and the table says whose each tile is, or where
    each expert ends."""
    rows_of_tile = 16
    ids = random_ids(num_rows, top_k, num_experts, seed=num_rows)
    ids[0, 0], ids[-1, -1] = num_experts + 5, -(1 << 32)  # out of range: nobody's
    tiles = permute.tiles_of(ids, num_experts, rows_of_tile, told=told)
    expected = [-1] * ids.numel()
    owners: list[int] = []
    counts: list[int] = []
    ends: list[int] = []
    for expert, slots in enumerate(slots_by_expert(ids, num_experts)):
        for index, slot in enumerate(slots):
            expected[slot] = len(owners) * rows_of_tile + index
        assert int(tiles.rows_of_expert[expert]) == len(slots)
        ends.append(len(owners) * rows_of_tile + len(slots))
        for first in range(0, len(slots), rows_of_tile):
            owners.append(expert)
            counts.append(min(rows_of_tile, len(slots) - first))
    assert tiles.place_of_slot.tolist() == expected
    assert all(int(tiles.slot_of_place[place]) == slot for slot, place in enumerate(expected) if place >= 0)
    assert int(tiles.num_tiles) == len(owners) <= tiles.max_tiles
    assert tiles.rows_of_tile[: len(owners)].tolist() == counts
    table = owners + [-1] * (tiles.max_tiles - len(owners))
    tables = {"tiles": table, "places": [owner for owner in table for _ in range(rows_of_tile)], "ends": ends}
    assert tiles.expert_of_tile.tolist() == tables[told]


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), CASES)
def test_there_are_tiles_for_the_worst_case(num_rows: int, top_k: int, num_experts: int) -> None:
    """One row for every expert but the last, which has the rest: no choice of ids needs more tiles."""
    num_slots = num_rows * top_k
    flat = torch.arange(num_slots).clamp(max=num_experts - 1)
    tiles = permute.tiles_of(flat.view(num_rows, top_k), num_experts, 16)
    assert int(tiles.num_tiles) <= tiles.max_tiles
    assert int(tiles.rows_of_tile[: int(tiles.num_tiles)].sum()) == num_slots


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), CASES)
def test_rows_go_to_their_places_and_back(num_rows: int, top_k: int, num_experts: int) -> None:
    """Through the layout of DeepGEMM's masked GEMMs, from strided rows; dropped rows hold NaN."""
    ids = random_ids(num_rows, top_k, num_experts, seed=7)
    places = permute.masked_places_of(ids, num_experts, num_rows + 3)
    for expert, slots in enumerate(slots_by_expert(ids, num_experts)):
        there = [expert * (num_rows + 3) + index for index in range(len(slots))]
        assert places.place_of_slot[slots].tolist() == there
        assert int(places.rows_of_expert[expert]) == len(slots)
    x = torch.randn(num_rows, 24)[:, :20]
    weights = torch.rand(num_rows, top_k + 1)[:, :top_k]
    is_empty = (ids < 0).all(dim=1)
    x[is_empty] = torch.nan
    weights[ids < 0] = torch.nan
    moved = permute.scatter_rows(x, places, top_k)
    taken = places.place_of_slot >= 0
    assert torch.equal(moved[places.place_of_slot[taken]], x.repeat_interleave(top_k, 0)[taken])
    moved[~torch.isin(torch.arange(len(moved)), places.place_of_slot)] = torch.nan
    halves = permute.silu_and_mul_rows(moved, places)
    gate, up = x.chunk(2, dim=1)
    shares = weights.masked_fill(ids < 0, 0.0).sum(dim=1, keepdim=True)
    expected = (torch.nn.functional.silu(gate) * up * shares).masked_fill(is_empty[:, None], 0.0)
    torch.testing.assert_close(permute.gather_sum(halves, places, weights), expected)


@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), CASES)
@pytest.mark.parametrize("num_sms", [1, 3])
def test_experts(num_rows: int, top_k: int, num_experts: int, num_sms: int) -> None:
    experts, reference = with_reference(TritonGroupedExperts, num_experts, 40, 24)
    experts.num_sms = num_sms
    x = torch.randn(num_rows, 48)[:, :40]
    ids = random_ids(num_rows, top_k, num_experts, seed=3)
    weights = torch.rand(num_rows, top_k)
    x[(ids < 0).all(dim=1)] = torch.nan
    torch.testing.assert_close(experts(x, ids, weights), reference(x, ids, weights), atol=2e-6, rtol=1e-5)


@pytest.mark.usefixtures("_plain_deep_gemm")
@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), CASES)
@pytest.mark.parametrize("max_masked_rows", [0, 512])
def test_deep_gemm_experts(
    num_rows: int, top_k: int, num_experts: int, max_masked_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strided rows; those of no expert are NaN, and so are the weights of dropped slots."""
    monkeypatch.setattr(deep_gemm, "MASKED_MAX_ROWS", max_masked_rows)
    experts, reference = with_reference(DeepGemmExperts, num_experts, 40, 24)
    x, weights = torch.randn(num_rows, 48)[:, :40], torch.rand(num_rows, top_k)
    ids = random_ids(num_rows, top_k, num_experts, seed=3)
    x[(ids < 0).all(dim=1)] = torch.nan
    expected = reference(x, ids, weights)
    weights[ids < 0] = torch.nan
    torch.testing.assert_close(experts(x, ids, weights), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("widths", [(32, 32), (33, 17), (16, 48)])
@pytest.mark.parametrize(("group", "use_tma"), [(1, False), (2, True), (8, True), (8, False)])
def test_blocks_that_do_not_fit(widths: tuple[int, int], group: int, use_tma: bool) -> None:
    """Widths that are no multiple of the blocks, several tiles per expert, any grouping: each block exactly once."""
    hidden_size, inter = widths
    reference = ReferenceExperts(3, hidden_size, inter, dtype=torch.float32)
    for parameter in reference.parameters():
        parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    x, weights = torch.randn(60, hidden_size), torch.rand(60, 2)
    ids = random_ids(60, 2, 3, seed=5)
    gemm = GemmConfig(16, 32, 4, 2, 2, group, use_tma)
    out = grouped_mlp(x, ids, weights, reference.w13, reference.w2, TileConfig(16, gemm, gemm), num_sms=2)
    torch.testing.assert_close(out, reference(x, ids, weights), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("hidden_size", "top_k"), [(24, 6), (10, 8), (1030, 1), (16, 0)])
@pytest.mark.parametrize(("num_rows", "num_padded"), [(0, 3), (5, 5), (4, 9)])
def test_packing(hidden_size: int, top_k: int, num_rows: int, num_padded: int) -> None:
    """The same parts of rows as on a CPU, from strided x."""
    layout = RowFormat(hidden_size, top_k, torch.float16)
    x = torch.randn(num_rows, hidden_size + 6).half()[:, :hidden_size]
    ids, weights = torch.randint(-1, 64, (num_rows, top_k)), torch.rand(num_rows, top_k)
    expected = layout.pack(x, ids, weights, num_padded, 77)
    found = torch.full_like(expected, 255)
    parts_at = [part.storage_offset() * part.element_size() for part in layout.unpack(found)]
    pack_kernels.pack(found, *parts_at[1:], x, ids, weights, 77, -1)
    for mine, theirs in zip(layout.unpack(found), layout.unpack(expected), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(layout.numbers(found), layout.numbers(expected))


@pytest.mark.usefixtures("_launches", "_plain_deep_gemm")
@pytest.mark.parametrize("kind", [TritonGroupedExperts, DeepGemmExperts])
def test_ids_of_received_rows(kind: type[Experts]) -> None:
    """Experts know theirs among the ids of all, in rows of bytes and beside ids that nobody has."""
    layout = RowFormat(40, 3, torch.float32)
    ids = random_ids(90, 3, 8, seed=11)
    x, ids, weights = layout.unpack(layout.pack(torch.randn(90, 40), ids, torch.rand(90, 3), 93))
    experts, reference = with_reference(kind, 4, 40, 24)
    experts.num_experts, experts.num_sms = 8, 2
    experts.local_id_of = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1, -1])
    expected = reference(x, experts.local_ids(ids), weights)
    torch.testing.assert_close(experts(x, ids, weights), expected, atol=2e-6, rtol=1e-5)
    places = permute.tiles_of(ids, 4, 16, experts.local_id_of).place_of_slot
    ids[ids < 0] = 9
    assert torch.equal(permute.tiles_of(ids, 4, 16, experts.local_id_of).place_of_slot, places)
