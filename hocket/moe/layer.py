"""The sparse layer: route, send, compute, bring back, add the shared experts. Knows no backend and no model.

Shapes: T rows (padded), D hidden, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.moe.base import DROPPED, TokenLayout
from hocket.moe.experts.base import Experts
from hocket.moe.router import Router
from hocket.moe.transport.base import Transport
from hocket.ubatch import context as ubatch
from hocket.ubatch.transfer import Running


class MoELayer(nn.Module):
    """Σ over a token's top-k experts of weight · expert(x), plus the shared experts where there are any."""

    def __init__(
        self, router: Router, experts: Experts, transport: Transport, shared_experts: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.transport = transport
        self.shared_experts = shared_experts
        self._load: Tensor | None = None

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """x [T, D], T = layout.num_padded → [T, D] in x.dtype; what padding rows hold reaches no other row."""
        topk_weights, topk_ids = self.router(x)
        if layout.is_padding is not None:
            topk_ids = topk_ids.masked_fill(layout.is_padding[:, None], DROPPED)
        if self._load is not None:
            self._count(self._load, topk_ids)
        dispatch = Running(self.transport.prepare(x, topk_ids, topk_weights, layout), "dispatch")
        dispatch.hand_over()
        sent = dispatch.finish()
        failure: Exception | None = None
        try:
            expert_out = self.experts(sent.x, sent.local_ids, sent.weights)
        except Exception as error:  # the other ranks wait for this layer's combine: send zeros, then fail
            failure, expert_out = error, torch.zeros_like(sent.x)
        combine = Running(self.transport.finalize(expert_out, sent.handle), "combine")
        shared: Tensor | None = None
        try:
            shared = None if self.shared_experts is None else self.shared_experts(x)
        except Exception as error:
            failure = failure or error
        combine.hand_over()
        out = combine.finish()
        ubatch.layer_done()
        if failure is not None:
            raise failure
        return out if shared is None else out + shared

    def join(self, layout: TokenLayout) -> None:
        """Take part in this layer's collectives without tokens and with zeros for those of other ranks."""
        nothing = TokenLayout.of(0, 0, layout.num_padded_max, self.router.weight.device)
        top_k, (_, hidden_size) = self.router.config.top_k, self.router.weight.shape
        weight = self.experts.w13
        x = weight.new_zeros(0, hidden_size)
        ids = torch.zeros(0, top_k, dtype=torch.int64, device=weight.device)
        weights = torch.zeros(0, top_k, dtype=torch.float32, device=weight.device)
        dispatch = Running(self.transport.prepare(x, ids, weights, nothing), "dispatch")
        dispatch.hand_over()
        sent = dispatch.finish()
        combine = Running(self.transport.finalize(torch.zeros_like(sent.x), sent.handle), "combine")
        combine.hand_over()
        combine.finish()
        ubatch.layer_done()

    @property
    def expert_load(self) -> Tensor | None:
        """int64 [E]: how often this rank's real tokens chose each expert since counting began; None when off."""
        return None if self._load is None else self._load[:-1]

    def count_expert_load(self, is_on: bool = True) -> None:
        """Start counting from zero, or stop. Off at construction."""
        num_experts, device = self.router.config.num_experts, self.router.weight.device
        self._load = torch.zeros(num_experts + 1, dtype=torch.int64, device=device) if is_on else None

    @staticmethod
    def _count(load: Tensor, topk_ids: Tensor) -> None:
        """Add topk_ids [T, K] to load [E + 1], whose last entry takes the dropped slots."""
        flat = topk_ids.flatten()
        flat = torch.where(flat < 0, load.shape[0] - 1, flat)
        load.scatter_add_(0, flat, torch.ones_like(flat))
