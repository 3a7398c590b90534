"""Fused operations of the layers in Triton: one or two launches each. Knows no layer and no model.

Everything is fp32 inside and rounded once, at the end. Nothing makes the host wait, and launches depend on shapes
alone, so all of it can be captured in a CUDA graph. Importing it imports triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.config.moe import MoEConfig
from hocket.layers import triton_elementwise, triton_heads, triton_routing
from hocket.layers.kernels import Kernels, Places
from hocket.layers.rotary import Rotation


class TritonKernels(Kernels):
    """PyTorch's matrix products, Triton between them."""

    name = "triton"

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return super().logits(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)  # the sums as they are, never rounded to x's dtype

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_elementwise.silu_mul(gate_up)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        return triton_elementwise.rms_norm(rows, None, weight, eps)[0].view(x.shape)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, total = triton_elementwise.rms_norm(x, residual, weight, eps, beside)
        assert total is not None
        return normed, total

    def latent_rows(
        self,
        q: Tensor,
        compressed: Tensor,
        k_rot: Tensor,
        weight: Tensor,
        eps: float,
        rotation: Rotation,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, bool]:
        query, latent = triton_heads.latent_rows(q, compressed, k_rot, weight, eps, rotation, places)
        return query, latent, places is not None

    def normed_heads(
        self, query: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        return triton_heads.normed_heads(query, key, q_weight, k_weight, eps, rotation)

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: MoEConfig, is_padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return triton_routing.route(x, weight, bias, config, is_padding)
