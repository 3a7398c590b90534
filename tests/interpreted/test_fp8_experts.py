"""What fp8 experts ask of DeepGEMM, which a plain stand-in plays: places, scales and layouts, masked and contiguous."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hocket.moe.experts import deep_gemm
from hocket.moe.experts import fp8 as module
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.grouped import GroupedRows
from hocket.quant import fp8, kernels

CPU = torch.device("cpu")
ALIGNMENT = 16
Pair = tuple[Tensor, Tensor]


def product(rows: Pair, weight: Pair, expert: int) -> Tensor:
    """[rows, N] as DeepGEMM would; the kernels wrote fp32 here (see test_fp8_kernels)."""
    values = fp8.expand_rows(rows[0].to(fp8.DTYPE), rows[1])
    return (values @ fp8.expand_blocks(weight[0][expert], weight[1][expert]).t()).bfloat16()


def contiguous(rows: Pair, weight: Pair, out: Tensor, expert_of_row: Tensor) -> None:
    values, scales = rows
    assert scales.stride(0) == 1
    assert scales.stride(1) == len(values), "each column of scales must follow the last"
    assert len(expert_of_row) == len(values) == len(out)
    out.fill_(float("nan"))
    for first in range(0, len(values), ALIGNMENT):
        expert = int(expert_of_row[first])
        if expert >= 0:
            tile = slice(first, first + ALIGNMENT)
            assert (expert_of_row[tile] == expert).all()
            out[tile] = product((values[tile], scales[tile]), weight, expert)


def masked(rows: Pair, weight: Pair, out: Tensor, num_rows: Tensor, expected: int) -> None:
    values, scales = rows
    assert scales.stride() == (scales.shape[1] * scales.shape[2], 1, scales.shape[1])
    assert expected > 0
    out.fill_(float("nan"))
    for expert, count in enumerate(num_rows.tolist()):
        out[expert, :count] = product((values[expert, :count], scales[expert, :count]), weight, expert)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: ALIGNMENT,
        m_grouped_fp8_gemm_nt_contiguous=contiguous,
        fp8_m_grouped_gemm_nt_masked=masked,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(kernels, "DTYPE", torch.float32)


def random_experts(generator: torch.Generator) -> Fp8Experts:
    experts = Fp8Experts(4, 256, 128, device=CPU, dtype=torch.bfloat16)
    for i in range(4):
        for key in ("w13", "w2"):
            shape = getattr(experts, key).shape[1:]
            values, scales = fp8.quantize_blocks(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            getattr(experts, key)[i].copy_(values)
            getattr(experts, f"{key}_scale")[i].copy_(scales)
    return experts


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize("max_masked_rows", [0, 2**20])
@pytest.mark.parametrize(("num_rows", "top_k"), [(1, 1), (9, 2), (21, 3)])
def test_experts(num_rows: int, top_k: int, max_masked_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MASKED_ROWS", max_masked_rows)
    generator = torch.Generator().manual_seed(num_rows)
    experts = random_experts(generator)
    x = torch.randn(num_rows, 256, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(6, generator=generator)[:top_k] - 2 for _ in range(num_rows)]).clamp(min=-1)
    weights = torch.rand(num_rows, top_k, generator=generator)
    expected = experts(x, ids, weights).float()
    monkeypatch.setattr(module, "is_on_host", lambda _: False)
    found = experts(x, ids, weights).float()
    assert found.isfinite().all()
    # Both round to fp8 in between; where they differ by a bit before, they may by a step of e4m3 after.
    assert (found - expected).norm() <= 2.0**-6 * expected.norm()


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|All-NaN slice) encountered:RuntimeWarning"
)  # where nothing is
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("counts", [(3, 0, 9, 1), (0, 0, 0, 16)])
def test_rows_by_expert(counts: tuple[int, ...], is_quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, or quantised where they come from; NaN where there is no row."""
    monkeypatch.setattr(deep_gemm, "MASKED_ALIGN", ALIGNMENT)
    generator = torch.Generator().manual_seed(sum(counts))
    experts = random_experts(generator)
    x = torch.full((4, ALIGNMENT, 256), float("nan")).bfloat16()
    scales = torch.full((4, 2, ALIGNMENT), float("nan")).transpose(1, 2)
    values = x.to(fp8.DTYPE)
    for expert, count in enumerate(counts):
        x[expert, :count] = torch.randn(count, 256, generator=generator)
        values[expert, :count], scales[expert, :count] = fp8.quantize_rows(x[expert, :count])
    rows = GroupedRows(x=x, counts=torch.tensor(counts, dtype=torch.int32), max_rows=40, expected_rows=2.0)
    expected = experts.forward_grouped(rows).float()
    if is_quantised:
        rows = replace(rows, x=values, scales=scales)
    monkeypatch.setattr(module, "is_on_host", lambda _: False)
    found = experts.forward_grouped(rows).float()
    for expert, count in enumerate(counts):
        mine, theirs = found[expert, :count], expected[expert, :count]
        assert (mine - theirs).norm() <= 2.0**-6 * theirs.norm()
