"""Triton: RMS normalisation with the addition before it, and the gate of gated blocks. Knows no layers and no models.

Everything is fp32 inside and rounded once, where it is stored. One program has one row, or a part of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_WARP = 512
MAX_WARPS = 16
SILU_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, x_stride, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * width + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + cols, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, value * scale * gain, mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    first = gate_up + row * stride
    gate = tl.load(first + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, gate * tl.sigmoid(gate) * up, mask=inside)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """x [T, N] (rows may lie apart), residual [T, N] → (norm of residual + x, residual + x or None)."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(out)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2N] (rows may lie apart) → [T, N]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_rows, width)
    block = min(triton.next_power_of_2(width), SILU_BLOCK)
    grid = (num_rows, triton.cdiv(width, block))
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, BLOCK=block)
    return out
