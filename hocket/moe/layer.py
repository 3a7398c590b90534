"""The sparse layer: route, send, compute, bring back, add the shared experts. Knows no backend and no model.

Shapes: T rows (padded), D hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import OverlapError
from hocket.moe.base import TokenLayout
from hocket.moe.experts.base import Experts
from hocket.moe.router import Router
from hocket.moe.side import INLINE, Side
from hocket.moe.transport.base import Received, Transport
from hocket.trace import spans
from hocket.trace.spans import Stage
from hocket.ubatch import context as ubatch
from hocket.ubatch.transfer import Running, Transfer, cannot_go_on


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
        self.side: Side = INLINE  # where the shared experts are computed while tokens travel
        self._load: Tensor | None = None
        self._sample: Tensor | None = None

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """x [T, D], T = layout.num_padded → [T, D] in x.dtype; what padding rows hold reaches no other row."""
        out, shared = self.summands(x, layout)
        return out if shared is None else out + shared

    def summands(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor | None]:
        """What the routed and the shared experts (None: there are none) add to a token, both as `forward`."""
        ubatch.refuse_inside_operator()
        topk_weights, topk_ids = self.router(x, layout.is_padding)
        if self._load is not None:
            self._count(self._load, topk_ids)
        if self._sample is not None:
            self._count(self._sample, topk_ids)
        call = _Call(self, x, topk_ids, topk_weights, layout)
        found = call.run()
        if call.failure is not None:
            raise call.failure
        return found

    def join(self, layout: TokenLayout) -> None:
        """Take part in this layer's collectives without tokens and with zeros for those of other ranks."""
        nothing = TokenLayout.of(0, 0, layout.num_padded_max, self.router.weight.device)
        top_k, (_, hidden_size) = self.router.config.top_k, self.router.weight.shape
        weight = self.experts.w13
        x = weight.new_zeros(0, hidden_size, dtype=self.experts.dtype)
        ids = torch.zeros(0, top_k, dtype=torch.int64, device=weight.device)
        weights = torch.zeros(0, top_k, dtype=torch.float32, device=weight.device)
        _Call(self, x, ids, weights, nothing, is_joining=True).run()

    @property
    def expert_load(self) -> Tensor | None:
        """int64 [E]: how often this rank's real tokens chose each expert since counting began; None when off."""
        return None if self._load is None else self._load[:-1]

    def count_expert_load(self, is_on: bool = True) -> None:
        """Start counting from zero, or stop. Off at construction."""
        num_experts, device = self.router.config.num_experts, self.router.weight.device
        self._load = torch.zeros(num_experts + 1, dtype=torch.int64, device=device) if is_on else None

    def sample_expert_load(self, into: Tensor | None) -> None:
        """From now on also add to `into` [E + 1], whose last entry takes slots of no expert; None: to nothing."""
        self._sample = into

    @staticmethod
    def _count(load: Tensor, topk_ids: Tensor) -> None:
        """Add topk_ids [T, K] to load [E + 1], whose last entry takes the dropped slots."""
        flat = topk_ids.flatten()
        flat = torch.where(flat < 0, load.shape[0] - 1, flat)
        load.scatter_add_(0, flat, torch.ones_like(flat, dtype=load.dtype))


class _Call:
    """One pass through a layer, in the order that the ubatch's schedule says: what its stages leave for each other.

    A stage that fails leaves zeros, or nothing, and `failure`: the other ranks wait for this layer's collectives.
    """

    def __init__(
        self,
        layer: MoELayer,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        layout: TokenLayout,
        is_joining: bool = False,
    ) -> None:
        self._layer = layer
        self._x = x
        spans.begin(Stage.DISPATCH)
        self._tokens = layer.transport.prepare(x, topk_ids, topk_weights, layout)
        self._ready = ubatch.mark()  # of what is sent next
        self._is_joining = is_joining
        self._last: Running[Any] | None = None
        self._dispatch: Running[Received]
        self._sums: Transfer[Tensor]
        self._combine: Running[Tensor]
        self._shared: Callable[[], Tensor | None] = _nothing
        self._shared_out: Tensor | None = None
        self.failure: Exception | None = None

    def run(self) -> tuple[Tensor, Tensor | None]:
        """The routed and the shared experts' results, both [T, D].

        Raises:
            OverlapError: the rank cannot do its part of the layer's collectives, which the others wait for.
        """
        try:
            for stage in ubatch.order():
                _STEPS[stage](self)
            out = self._combine.finish(Stage.QKV)
        except OverlapError:
            raise
        except Exception as error:
            raise cannot_go_on(spans.stage(), error) from error
        ubatch.layer_done()
        return out, self._shared_out

    def _send_tokens(self) -> None:
        if (shared := self._layer.shared_experts) is not None:
            self._shared = self._layer.side.begin(lambda: self._attempt(lambda: shared(self._x)))
        self._last = self._dispatch = Running(self._tokens, Stage.DISPATCH, self._ready)

    def _hand_over(self) -> None:
        if self._last is None:
            ubatch.hand_over()
        else:
            self._last.hand_over()

    def _compute_experts(self) -> None:
        sent = self._dispatch.finish(Stage.EXPERTS)
        out = self._attempt(lambda: sent.through(self._layer.experts))
        spans.begin(Stage.COMBINE)
        self._sums = self._layer.transport.finalize(sent.nothing() if out is None else out, sent.handle)
        self._ready = ubatch.mark()

    def _send_back(self) -> None:
        self._last = self._combine = Running(self._sums, Stage.COMBINE, self._ready)

    def _compute_shared(self) -> None:
        if self._layer.shared_experts is not None:
            spans.begin(Stage.SHARED)
            # What is computed there refers to this call: kept, the two would hold the layer's tensors until Python
            # looks for cycles.
            compute, self._shared = self._shared, _nothing
            self._shared_out = compute()

    def _attempt(self, compute: Callable[[], Tensor]) -> Tensor | None:
        """What `compute` gives; None after a failure, this one's or an earlier one's."""
        if self._is_joining or self.failure is not None:
            return None
        try:
            return compute()
        except Exception as error:
            self.failure = error
            spans.fail()
            return None


def _nothing() -> None:
    return None


_STEPS: dict[Stage, Callable[[_Call], None]] = {
    Stage.DISPATCH: _Call._send_tokens,
    Stage.EXPERTS: _Call._compute_experts,
    Stage.COMBINE: _Call._send_back,
    Stage.SHARED: _Call._compute_shared,
    Stage.HAND_OVER: _Call._hand_over,
}
