"""The kernels that quantise rows give the plain reference's bits: whole and odd sizes, strided, zero and NaN rows.

Triton's interpreter loses the carry when it rounds to fp8, so here the kernels write fp32 and PyTorch rounds.
"""

from __future__ import annotations

import pytest
import torch

from hocket.quant import fp8, kernels


@pytest.fixture(autouse=True)
def _unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DTYPE", torch.float32)


def rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """fp32 with blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator)
    return x * torch.exp(4 * torch.randn(num_rows, width // 128, generator=generator)).repeat_interleave(128, 1)


def rounded(found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return found[0].to(fp8.DTYPE), found[1]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, NaN where NaN is expected."""
    return torch.equal(found.float().nan_to_num(nan=1e9), expected.float().nan_to_num(nan=1e9))


@pytest.mark.parametrize(("num_rows", "width"), [(0, 128), (1, 128), (3, 384), (5, 1152), (8, 2048)])
def test_rows(num_rows: int, width: int) -> None:
    x = rows(num_rows, width)
    values, scales = rounded(kernels.quantize_rows(x))
    expected, expected_scales = fp8.quantize_rows(x)
    assert same(values, expected)
    assert same(scales, expected_scales)
    assert scales.stride() == expected_scales.stride()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_strided_zero_and_nan_rows() -> None:
    x = rows(6, 512)[:, :384]
    x[2] = 0
    x[4] = float("nan")
    values, scales = rounded(kernels.quantize_rows(x))
    expected, expected_scales = fp8.quantize_rows(x)
    others = [0, 1, 2, 3, 5]
    assert same(values[others], expected[others])
    assert same(scales[others], expected_scales[others])
    assert values[4].float().isnan().all()
    assert fp8.expand_rows(values, scales)[2].eq(0).all()


@pytest.mark.parametrize(("num_rows", "width"), [(0, 128), (3, 256), (5, 1152)])
def test_gated_rows(num_rows: int, width: int) -> None:
    gate_up = rows(num_rows, 2 * width).clamp(-50, 50)
    gate, up = gate_up.chunk(2, dim=1)
    exact = (torch.nn.functional.silu(gate.double()) * up).float()
    found = fp8.expand_rows(*rounded(kernels.quantize_gated_rows(gate_up)))
    largest = exact.unflatten(1, (-1, 128)).abs().amax(2, keepdim=True)
    error = (found - exact).unflatten(1, (-1, 128)).abs()
    # Half a unit in the last of 3 bits, or of the smallest numbers that e4m3 has; fp32 rounding on top.
    allowed = torch.maximum(exact.unflatten(1, (-1, 128)).abs() * 2.0**-4, largest / 448 * 2.0**-10) * 1.001
    assert (error <= allowed).all()


@pytest.mark.parametrize("width", [128, 1152])
def test_places(width: int) -> None:
    """Two groups of 4 places for 3 rows of 2 slots, of which one is nowhere."""
    x = rows(3, width)
    places = torch.tensor([6, 1, -1, 0, 3, 4], dtype=torch.int32)
    values, scales = rounded(kernels.quantize_to_places(x, places, 8, 4))
    expected, expected_scales = fp8.quantize_rows(x)
    taken, of_row = [6, 1, 0, 3, 4], [0, 0, 1, 2, 2]
    assert same(values[taken], expected[of_row])
    assert same(scales.flatten(0, 1)[taken], expected_scales[of_row])
    assert scales.shape == (2, 4, width // 128)
    assert scales.stride()[1:] == (1, 4)


def test_gated_places() -> None:
    gate_up = rows(8, 2 * 384).clamp(-50, 50)
    places = torch.tensor([6, 1, -1, 0, 3, 4], dtype=torch.int32)
    values, scales = rounded(kernels.quantize_gated_places(gate_up, places, 8))
    expected, expected_scales = rounded(kernels.quantize_gated_rows(gate_up))
    taken = [6, 1, 0, 3, 4]
    assert same(values[taken], expected[taken])
    assert same(scales[0, taken], expected_scales[taken])
