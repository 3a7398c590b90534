"""The gated feed-forward block (SwiGLU, arXiv 2002.05202). Knows nothing of experts or checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.layers.kernels import PLAIN, Kernels
from hocket.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)); `gate_up` holds the gate's rows first, then up's."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels = PLAIN,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, device=device, dtype=dtype, kernels=kernels)
        self.down = Linear(intermediate_size, hidden_size, device=device, dtype=dtype, kernels=kernels)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] → [T, hidden_size]."""
        return self.down.gated(self.gate_up(x))
