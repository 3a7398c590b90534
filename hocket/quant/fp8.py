"""Block-scaled fp8 (e4m3): rows of activations in blocks of 128 columns, matrices in blocks of 128 × 128.

The arithmetic in plain PyTorch, and which kernels run it where. Knows no layer, no model and no checkpoint.
Formats as DeepSeek-V3 publishes them (arXiv 2412.19437 §3.3.2). Legend: T rows, K input width, N output width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

BLOCK = 128
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite e4m3 number."""
SMALLEST_MAX = 1e-10
"""A block of smaller numbers is scaled as if this were its largest, so that zeros stay zeros."""
SCALE_ROWS = 4
"""Scales of rows lie column by column, each column a multiple of 16 bytes (what TMA copies can address)."""


def blocks(width: int) -> int:
    """How many blocks cover `width`."""
    return -(-width // BLOCK)


def unsupported_reason(device: torch.device, dtype: torch.dtype, block: tuple[int, int]) -> str | None:
    """Why products cannot run in fp8 here, or None where they can."""
    if device.type != "cuda":
        return f"fp8 kernels need an NVIDIA GPU, this is a {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"fp8 kernels are for compute capability 9.0, {torch.cuda.get_device_name(device)} has another"
    why = without_kernels(dtype, block)
    if why is not None:
        return why
    try:
        importlib.import_module("deep_gemm")
    except Exception as error:  # it loads native code and looks for a compiler: many kinds of errors
        return f"deep_gemm cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    return None


def without_kernels(dtype: torch.dtype, block: tuple[int, int]) -> str | None:
    """Why products cannot run in fp8 on any device, or None where they can on some."""
    if block != (BLOCK, BLOCK):
        return f"fp8 kernels take blocks of {BLOCK} x {BLOCK}, not of {block[0]} x {block[1]}"
    return None if dtype == torch.bfloat16 else f"fp8 kernels give bfloat16, the model is in {dtype}"


def empty_row_scales(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Unset fp32 [num_rows, width / 128] with the strides that the kernels want: column by column, see SCALE_ROWS."""
    aligned = -(-num_rows // SCALE_ROWS) * SCALE_ROWS
    return torch.empty(blocks(width), aligned, device=device, dtype=torch.float32).t()[:num_rows]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K], K a multiple of 128 → (e4m3 [T, K], fp32 scales [T, K / 128], strided as `empty_row_scales`).

    x ≈ values · scale, each block's largest number scaled to the largest of e4m3. A block with NaN stays NaN.
    """
    parts = x.float().reshape(len(x), blocks(x.shape[1]), BLOCK)
    scales = _scales(parts.abs().amax(-1))
    out = empty_row_scales(x.shape[0], x.shape[1], x.device)
    out.copy_(scales)
    return (parts * (1.0 / scales)[..., None]).view(x.shape).to(DTYPE), out


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] → (e4m3 [N, K], fp32 scales [⌈N / 128⌉, ⌈K / 128⌉]): as checkpoints are published."""
    num_rows, width = weight.shape
    padded = weight.new_zeros(blocks(num_rows) * BLOCK, blocks(width) * BLOCK, dtype=torch.float32)
    padded[:num_rows, :width] = weight
    parts = padded.view(blocks(num_rows), BLOCK, blocks(width), BLOCK)
    scales = _scales(parts.abs().amax((1, 3)))
    quantized = (parts * (1.0 / scales)[:, None, :, None]).view(padded.shape)
    return quantized[:num_rows, :width].to(DTYPE).contiguous(), scales


def _scales(largest: Tensor) -> Tensor:
    return largest.clamp(min=SMALLEST_MAX) * (1.0 / LARGEST)


def expand_rows(values: Tensor, scales: Tensor) -> Tensor:
    """fp32 [T, K] of what `quantize_rows` gave."""
    return (values.float().view(*scales.shape, BLOCK) * scales[..., None]).view(values.shape)


def expand_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """fp32 [N, K] of what `quantize_blocks` gave."""
    num_rows, width = values.shape
    of_rows = scales.repeat_interleave(BLOCK, 0)[:num_rows]
    return values.float() * of_rows.repeat_interleave(BLOCK, 1)[:, :width]


def reference_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [T, K] quantised · weight e4m3 [N, K] with its block scales, in fp32 → [T, N] in x.dtype."""
    return (expand_rows(*quantize_rows(x)) @ expand_blocks(weight, scales).t()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [T, K] · weightᵀ → [T, N] in x.dtype (bf16 on a GPU); weight e4m3 [N, K], scales fp32 [⌈N / 128⌉, K / 128].

    Rows of x may lie apart, their numbers must not. T may be 0. On a GPU nothing makes the host wait.
    """
    if not x.is_cuda:
        return reference_linear(x, weight, scales)
    from hocket.quant import kernels

    return product(kernels.quantize_rows(x), weight, scales)


def gated_linear(gate_up: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`linear` of silu(gate) · up, gate_up [T, 2K] holding both: one launch less than apart."""
    if not gate_up.is_cuda:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return reference_linear((torch.nn.functional.silu(gate) * up), weight, scales).to(gate_up.dtype)
    from hocket.quant import kernels

    return product(kernels.quantize_gated_rows(gate_up), weight, scales)


def product(x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor) -> Tensor:
    """Quantised rows · weightᵀ → bf16 [T, N], by DeepGEMM."""
    import deep_gemm

    out = x[0].new_empty(x[0].shape[0], weight.shape[0], dtype=torch.bfloat16)
    if x[0].shape[0]:
        deep_gemm.fp8_gemm_nt(x, (weight, scales), out)
    return out


def limit_sms(num_sms: int) -> Callable[[], None]:
    """Let DeepGEMM take at most num_sms multiprocessors, everywhere in this process; what is returned brings back what
    was found. Kernels are compiled anew for each number."""
    import deep_gemm

    found = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(num_sms)
    return partial(deep_gemm.set_num_sms, found)
