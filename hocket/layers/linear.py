"""A matrix product with frozen weights. Knows nothing of checkpoints: merged projections are only rows of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x · weightᵀ (+ bias), weight [out_features, in_features]. Unset until loaded; the bias starts at 0."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = frozen(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] → [T, out_features]."""
        return F.linear(x, self.weight, self.bias)


def frozen(value: Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(value, requires_grad=False)
