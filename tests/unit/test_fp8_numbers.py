"""Block-scaled fp8 arithmetic: what rounding may cost, products, experts; against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.layers.linear import Fp8Linear
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.experts.reference import ReferenceExperts
from hocket.quant import fp8

CPU = torch.device("cpu")
ROUNDING = 2.0**-4
"""e4m3 has 3 bits behind the point: a normal number is off by half a unit in the last at most."""
SMALLEST = 2.0**-10 / fp8.LARGEST
"""Half of the smallest number that e4m3 has, over the largest: what a small number of a block is off at most."""


def uneven(rows: int, columns: int, seed: int) -> Tensor:
    """fp32 with blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(fp8.blocks(rows), fp8.blocks(columns), generator=generator))
    sizes = sizes.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return torch.randn(rows, columns, generator=generator) * sizes


def largest_of_blocks(x: Tensor, rows: int) -> Tensor:
    """For each number the largest of its block of `rows` × 128."""
    out = torch.empty_like(x)
    for row in range(0, x.shape[0], rows):
        for column in range(0, x.shape[1], 128):
            block = slice(row, row + rows), slice(column, column + 128)
            out[block] = x[block].abs().max()
    return out


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (3, 384), (130, 256)])
def test_rows_are_off_by_rounding_at_most(rows: int, columns: int) -> None:
    x = uneven(rows, columns, 1)
    values, scales = fp8.quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (rows, columns // 128)
    assert scales.stride(0) == 1
    assert scales.stride(1) % 4 == 0
    error = (fp8.expand_rows(values, scales) - x).abs()
    allowed = torch.maximum(x.abs() * ROUNDING, largest_of_blocks(x, 1) * SMALLEST)
    assert (error <= allowed * 1.001).all()
    assert error.max() > 0


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (136, 256), (300, 200)])
def test_blocks_are_off_by_rounding_at_most(rows: int, columns: int) -> None:
    x = uneven(rows, columns, 2)
    values, scales = fp8.quantize_blocks(x)
    assert scales.shape == (fp8.blocks(rows), fp8.blocks(columns))
    error = (fp8.expand_blocks(values, scales) - x).abs()
    allowed = torch.maximum(x.abs() * ROUNDING, largest_of_blocks(x, 128) * SMALLEST)
    assert (error <= allowed * 1.001).all()
    assert error.max() > 0


def test_zero_and_nan_rows() -> None:
    x = uneven(3, 256, 3)
    x[0], x[1, 5] = 0, float("nan")
    found = fp8.expand_rows(*fp8.quantize_rows(x))
    assert (found[0] == 0).all()
    assert found[1, :128].isnan().any()
    assert found[2].isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_linear(num_rows: int, has_bias: bool) -> None:
    linear = Fp8Linear(256, 200, bias=has_bias, device=CPU, dtype=torch.float32)
    values, scales = fp8.quantize_blocks(uneven(200, 256, 4))
    linear.weight.copy_(values)
    linear.scale.copy_(scales)
    if linear.bias is not None:
        linear.bias.copy_(torch.arange(200.0))
    x = uneven(num_rows, 256, 5) if num_rows else torch.zeros(0, 256)
    expanded = fp8.expand_blocks(values, scales).double()
    exact = fp8.expand_rows(*fp8.quantize_rows(x)).double() @ expanded.t()
    if has_bias:
        exact += torch.arange(200.0).double()
    assert torch.allclose(linear(x).double(), exact, rtol=1e-5, atol=1e-4 * float(exact.abs().max() if num_rows else 1))
    if num_rows:
        assert not torch.allclose(exact, x.double() @ expanded.t() + (exact - exact), rtol=1e-5), "x was not quantised"


def test_gated_linear() -> None:
    linear = Fp8Linear(128, 256, bias=False, device=CPU, dtype=torch.float32)
    values, scales = fp8.quantize_blocks(uneven(256, 128, 6))
    linear.weight.copy_(values)
    linear.scale.copy_(scales)
    gate_up = uneven(7, 256, 7).clamp(-9, 9)
    gate, up = gate_up.chunk(2, dim=1)
    assert torch.equal(linear.gated(gate_up), linear(torch.nn.functional.silu(gate) * up))


def experts_pair(num_experts: int) -> tuple[Fp8Experts, ReferenceExperts]:
    """Experts in fp8, and what they are expanded to."""
    held = Fp8Experts(num_experts, 256, 128, device=CPU, dtype=torch.float32)
    expanded = ReferenceExperts(num_experts, 256, 128, device=CPU, dtype=torch.float32)
    for name in ("w13", "w2"):
        for expert in range(num_experts):
            matrix = uneven(*getattr(expanded, name).shape[1:], 10 + expert)
            values, scales = fp8.quantize_blocks(matrix / matrix.norm(dim=1).mean())
            getattr(held, name)[expert].copy_(values)
            getattr(held, f"{name}_scale")[expert].copy_(scales)
            getattr(expanded, name)[expert].copy_(fp8.expand_blocks(values, scales))
    return held, expanded


def test_experts() -> None:
    held, expanded = experts_pair(3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 256, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] - 2 for _ in range(20)]).clamp(min=-1)
    weights = torch.rand(20, 3, generator=generator)
    is_empty = (ids < 0).all(dim=1)
    ids[3], x[3] = -1, float("nan")
    out, expected = held(x, ids, weights), expanded(x, ids, weights)
    is_empty[3] = True
    assert (out[is_empty] == 0).all()
    # Rounding of x and of the product in between: independent errors of 2^-4 / sqrt(3) at most each.
    error = (out - expected).norm() / expected.norm()
    assert 0 < error < 2 * ROUNDING
    assert held(x[:0], ids[:0], weights[:0]).shape == (0, 256)
    with pytest.raises(HocketError):
        held(x, ids + 3, weights)


def test_where_fp8_runs() -> None:
    reason = fp8.unsupported_reason(CPU, torch.bfloat16, (128, 128))
    assert reason is not None
    assert "NVIDIA GPU" in reason
