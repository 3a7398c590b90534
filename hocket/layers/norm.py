"""Root-mean-square normalisation. Knows nothing of where in a model it stands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.layers.linear import frozen


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis (arXiv 1910.07467), computed in fp32."""

    def __init__(self, width: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(torch.ones(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] → the same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
