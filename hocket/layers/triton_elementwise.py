"""Triton: RMS normalisation with the addition before it, and the gate of gated blocks. Knows no layers and no models.

Everything is fp32 inside and rounded once, where it is stored. One program has one row, or a part of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches

ELEMENTS_PER_WARP = 512
MAX_WARPS = 16
SILU_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    beside,
    weight,
    out,
    x_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * width + cols, mask=inside, other=0.0).to(tl.float32)
        if HAS_BESIDE:
            value += tl.load(beside + row * width + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * width + cols, value, mask=inside)  # the sum, over what it is of
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


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """x [T, N] (rows may lie apart), residual [T, N] and beside [T, N], which is only added where there is a residual →
    (norm of their sum, the sum or None without a residual). A contiguous residual becomes the sum."""
    num_rows, width = x.shape
    stride, step = x.stride()
    assert step == 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is not None:
        residual = residual.contiguous()
        beside = None if beside is None else beside.contiguous()
    has = residual is not None, beside is not None
    _rms_norm_launch(num_rows, width, stride, eps, *has)(x, residual, beside, weight, out)
    return out, residual


@launches
def _rms_norm_launch(
    num_rows: int, width: int, stride: int, eps: float, has_residual: bool, has_beside: bool
) -> Launch:
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS)
    constants = {"HAS_RESIDUAL": has_residual, "HAS_BESIDE": has_beside, "BLOCK": block, "num_warps": num_warps}
    return Launch(_rms_norm_kernel, (num_rows,), stride, width, eps, **constants)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2N] (rows may lie apart) → [T, N]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    stride, step = gate_up.stride()
    assert step == 1
    out = gate_up.new_empty(num_rows, width)
    _silu_mul_launch(num_rows, width, stride)(gate_up, out)
    return out


@launches
def _silu_mul_launch(num_rows: int, width: int, stride: int) -> Launch:
    block = min(triton.next_power_of_2(width), SILU_BLOCK)
    return Launch(_silu_mul_kernel, (num_rows, triton.cdiv(width, block)), stride, width, BLOCK=block)
