"""A matrix product with frozen weights. Knows nothing of checkpoints: merged projections are only rows of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.layers.kernels import PLAIN, Kernels


class Linear(nn.Module):
    """y = x · weightᵀ (+ bias), weight [out_features, in_features]. Unset until loaded; the bias starts at 0."""

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


def frozen(value: Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(value, requires_grad=False)
