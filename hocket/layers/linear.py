"""Matrix products with frozen weights. Knows nothing of checkpoints: merged projections are only rows of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.layers.kernels import PLAIN, Kernels
from hocket.quant import fp8


class Linear(nn.Module):
    """y = x · weightᵀ (+ bias), weight [out_features, in_features]. Unset until loaded; the bias starts at 0.

    It has no hooks: there are five products in a layer, and looking for hooks takes the host as long as a small launch.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels = PLAIN,
    ) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = frozen(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] → [T, out_features]."""
        return self.kernels.linear(x, self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def gated(self, gate_up: Tensor) -> Tensor:
        """The product of silu(gate) · up, gate_up [T, 2 · in_features] holding both → [T, out_features]."""
        return self(self.kernels.silu_mul(gate_up))


class Fp8Linear(Linear):
    """The same with a block-scaled fp8 weight (quant/fp8.py) and x quantised on the way.

    `scale` fp32 [⌈out_features / 128⌉, in_features / 128]. Rows of a block have one scale: matrices merged into one
    must begin at multiples of 128 rows.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, 0, bias=bias, device=device, dtype=dtype)
        self.weight = frozen(torch.empty(out_features, in_features, device=device, dtype=fp8.DTYPE))
        shape = fp8.blocks(out_features), fp8.blocks(in_features)
        self.scale = frozen(torch.empty(shape, device=device, dtype=torch.float32))
        self.bias = frozen(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] → [T, out_features] in x.dtype."""
        return self._biased(fp8.linear(x, self.weight, self.scale))

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._biased(fp8.gated_linear(gate_up, self.weight, self.scale))

    def _biased(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias


def frozen(value: Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(value, requires_grad=False)
