"""Root-mean-square normalisation. Knows nothing of where in a model it stands."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.layers.kernels import PLAIN, Kernels
from hocket.layers.linear import frozen


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis (arXiv 1910.07467), computed in fp32."""

    def __init__(
        self, width: int, eps: float, *, device: torch.device, dtype: torch.dtype, kernels: Kernels = PLAIN
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = frozen(torch.ones(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] → the same shape and dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor | None, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, width] and what it is added to (None: nothing), which may be overwritten → (norm of
        the sum, the sum)."""
        if residual is None:
            assert beside is None
            return self(x), x
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps, beside)
