"""Experts backends against a calculation in fp64, row by row."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.config.backends import CPU_EXPERTS, GPU_EXPERTS
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import BackendUnavailable, ConfigError, HocketError
from hocket.moe.experts.base import Experts
from hocket.moe.experts.registry import experts_class, suitable_class
from hocket.moe.experts.tile_config import tile_config

HIDDEN, INTER = 24, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

backends = pytest.mark.parametrize("backend", CPU_EXPERTS)


def make(backend: str, num_experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Experts:
    generator = torch.Generator().manual_seed(seed)
    experts = experts_class(backend)(num_experts, HIDDEN, INTER, dtype=dtype)
    experts.w13.copy_(torch.randn(experts.w13.shape, generator=generator) * HIDDEN**-0.5)
    experts.w2.copy_(torch.randn(experts.w2.shape, generator=generator) * INTER**-0.5)
    return experts


def slow(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """fp64, one (row, slot) after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[row, slot])
            if expert >= 0:
                gate, up = (experts.w13[expert].double() @ x[row].double()).chunk(2)
                out[row] += weights[row, slot].double() * (experts.w2[expert].double() @ (F.silu(gate) * up))
    return out


@backends
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_experts=st.integers(1, 9),
    num_rows=st.integers(0, 20),
    top_k=st.integers(1, 8),
    dropped=st.sampled_from((0.0, 0.4, 1.0)),
    seed=st.integers(0, 99),
)
def test_weighted_sum(
    backend: str, dtype: torch.dtype, num_experts: int, num_rows: int, top_k: int, dropped: float, seed: int
) -> None:
    """Any ids, also twice the same in a row; rows without experts hold NaN and come out as zero."""
    generator = torch.Generator().manual_seed(seed)
    experts = make(backend, num_experts, dtype, seed)
    x = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(0, num_experts, (num_rows, top_k), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < dropped] = -1
    weights = torch.rand(num_rows, top_k, generator=generator) / top_k
    is_empty = (ids < 0).all(dim=1)
    x[is_empty] = torch.nan
    weights[is_empty] = torch.nan
    out = experts(x, ids, weights)
    assert out.dtype == dtype
    assert out.shape == x.shape
    assert not out[is_empty].any()
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), slow(experts, x, ids, weights), atol=limit, rtol=limit)


@backends
def test_strided_rows(backend: str) -> None:
    """Transports hand over hidden states that are columns of a wider buffer."""
    experts = make(backend, 3)
    wide = torch.randn(6, HIDDEN + 8)
    ids = torch.tensor([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 0], [0, 2]])
    weights = torch.rand(6, 2)
    x = wide[:, :HIDDEN]
    torch.testing.assert_close(experts(x, ids, weights), experts(x.contiguous(), ids, weights))


@backends
def test_a_rank_without_experts(backend: str) -> None:
    experts = make(backend, 0)
    x = torch.full((3, HIDDEN), torch.nan)
    out = experts(x, torch.full((3, 2), -1), torch.ones(3, 2))
    assert out.shape == x.shape
    assert not out.any()
    with pytest.raises(HocketError, match=r"\[0, 0\)"):
        experts(x, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))


@backends
@pytest.mark.parametrize("wrong", [-2, 4])
def test_ids_out_of_range(backend: str, wrong: int) -> None:
    with pytest.raises(HocketError, match=r"expert ids must be -1 or in \[0, 4\)"):
        make(backend, 4)(torch.ones(1, HIDDEN), torch.tensor([[0, wrong]]), torch.ones(1, 2))


@backends
def test_ids_of_all_experts(backend: str) -> None:
    """Those of other ranks are skipped, and none of all is out of range."""
    experts = make(backend, 2)
    x, weights = torch.randn(3, HIDDEN), torch.rand(3, 2)
    expected = experts(x, torch.tensor([[-1, 1], [0, -1], [-1, -1]]), weights)
    experts.num_experts, experts.local_id_of = 4, torch.tensor([-1, 1, -1, 0, -1])
    assert torch.equal(experts(x, torch.tensor([[2, 1], [3, -1], [0, 2]], dtype=torch.int32), weights), expected)
    with pytest.raises(HocketError, match=r"expert ids must be -1 or in \[0, 4\)"):
        experts(x, torch.tensor([[4, 1], [3, -1], [0, 2]]), weights)


@backends
def test_sums_are_fp32_also_in_bf16(backend: str) -> None:
    """256 + eight times 0.5: in bf16 every single addition would be lost."""
    experts = experts_class(backend)(2, HIDDEN, INTER, dtype=torch.bfloat16)
    experts.w13.fill_(1.0)
    experts.w2.fill_(1.0)
    x = torch.full((1, HIDDEN), 0.25, dtype=torch.bfloat16)
    one = experts(x, torch.tensor([[0]]), torch.ones(1, 1)).float()
    weights = torch.tensor([[256.0, *[0.5] * 8]]) / one[0, 0]
    out = experts(x, torch.tensor([[0] + [1] * 8]), weights)
    torch.testing.assert_close(out.float(), torch.full((1, HIDDEN), 260.0), atol=0.0, rtol=2**-8)


@backends
def test_only_silu(backend: str) -> None:
    with pytest.raises(ConfigError, match="hidden_act"):
        experts_class(backend)(1, HIDDEN, INTER, hidden_act="gelu")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((24, 16, torch.bfloat16), "grouped_mm"),
        ((20, 12, torch.float32), "grouped_mm"),
        ((20, 16, torch.bfloat16), "reference"),
        ((24, 15, torch.float32), "reference"),
        ((24, 16, torch.float64), "reference"),
    ],
)
def test_the_reference_stands_in_and_says_why(
    sizes: tuple[int, int, torch.dtype], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert suitable_class("grouped_mm", *sizes).name == expected
    assert bool(caplog.messages) == (expected == "reference")
    assert all(m.startswith("experts backend grouped_mm replaced by reference: grouped_mm ") for m in caplog.messages)


def test_unknown_backends_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="available here: reference, grouped_mm"):
        experts_class("fused")


def test_auto_falls_back_to_the_reference_where_torch_lacks_grouped_mm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = (24, 16, torch.bfloat16)
    assert suitable_class("auto", *sizes).name == "grouped_mm"
    assert not caplog.messages
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert suitable_class("auto", *sizes).name == "reference"
    assert "has no torch.nn.functional.grouped_mm" in caplog.text
    with pytest.raises(BackendUnavailable, match="available here: reference"):
        suitable_class("grouped_mm", *sizes)


def test_resolving_leaves_the_choice_to_the_ranks() -> None:
    assert resolve(Options(model="tiny")).moe_backend == "auto"
    assert resolve(Options(model="tiny", moe_backend="grouped_mm")).moe_backend == "grouped_mm"


@pytest.mark.parametrize("name", GPU_EXPERTS)
def test_what_needs_a_gpu_is_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        resolve(Options(model="tiny", moe_backend=name, device="cpu"))
    works = "available here: reference, grouped_mm, tiled"
    assert str(caught.value).endswith(f"it runs on NVIDIA GPUs only, and the device is cpu; {works}")


@pytest.mark.parametrize(("name", "module"), [("triton_grouped", "triton"), ("deep_gemm", "deep_gemm")])
def test_what_is_not_installed_is_named(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable, match=f"{name}.*it needs .*{module}.*available here: reference, grouped_mm"):
        experts_class(name)


def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first of the order; where it is not installed or cannot, the next one, and why."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert suitable_class("auto", 24, 16, torch.bfloat16, "cuda").name == "triton_grouped"
    assert not caplog.messages
    assert suitable_class("auto", 24, 16, torch.float64, "cuda").name == "reference"
    assert [m.partition(":")[0] for m in caplog.messages] == [
        "experts backend triton_grouped replaced by reference",
        "experts backend grouped_mm replaced by reference",
    ]
    monkeypatch.setitem(sys.modules, "triton", None)
    assert suitable_class("auto", 24, 16, torch.bfloat16, "cuda").name == "grouped_mm"


def test_rows_per_expert_are_those_of_all_ranks() -> None:
    """With experts on four ranks a rank gets a quarter of the slots of all tokens that reach it."""
    ids = torch.zeros(16, 4, dtype=torch.int64)
    kind = experts_class("reference")
    assert kind(2, HIDDEN, INTER).rows_per_expert(ids) == 32
    assert kind(2, HIDDEN, INTER, num_experts=8).rows_per_expert(ids) == 8


@pytest.mark.parametrize("itemsize", [2, 4])
def test_block_sizes_grow_with_the_rows_and_fit(itemsize: int) -> None:
    """A program's blocks under way fit into the 227 KiB of shared memory of a Hopper multiprocessor. (Of more programs
    than fit beside each other the later ones wait, which costs little.)"""
    last = 0
    for rows in (0.5, *range(1, 300)):
        config = tile_config(rows, itemsize)
        assert config.block_m >= last
        last = config.block_m
        for gemm, num_weights in ((config.gate_up, 2), (config.down, 1)):
            columns = config.block_m + num_weights * gemm.block_n
            in_flight = columns * gemm.block_k * itemsize * (gemm.num_stages - 1)
            assert in_flight <= 227 * 1024
