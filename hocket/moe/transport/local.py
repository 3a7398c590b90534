"""The transport of a rank that holds all experts: nothing moves."""

from __future__ import annotations

from torch import Tensor

from hocket.moe.base import TokenLayout, check_ids
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.ubatch.transfer import Transfer


class LocalTransport(Transport):
    """Local indices are expert ids: one rank's placement is the identity."""

    name = "local"
    requires_padding = False
    captures = True
    max_sms = 0

    def __init__(self, placement: ExpertPlacement) -> None:
        assert placement.num_ranks == 1, placement
        self._num_experts = placement.num_experts

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        check_ids(topk_ids, self._num_experts, "expert ids")
        dispatched = Dispatched(x, topk_ids, topk_weights, Handle())
        return Transfer(_nothing, lambda: dispatched, lambda: 0)

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        return Transfer(_nothing, lambda: expert_out, lambda: 0)


def _nothing() -> None:
    """One rank has nobody to send to."""
