"""What routing, transports and experts share: a step's token layout and the check of expert ids. Knows no backend.

Shapes: T tokens (padded), K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.layers.routing import DROPPED as DROPPED


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Which rows of a rank's hidden states are tokens.

    num_tokens: real tokens; num_padded: rows of the hidden states (T); is_padding: bool [T], or None where every row
    is real; num_padded_max: the largest num_padded over all ranks, the same number on each of them.
    """

    num_tokens: int
    num_padded: int
    is_padding: Tensor | None
    num_padded_max: int

    def __post_init__(self) -> None:
        assert 0 <= self.num_tokens <= self.num_padded <= self.num_padded_max, self
        assert self.is_padding is not None or self.num_tokens == self.num_padded, "padding rows need is_padding"

    @classmethod
    def of(cls, num_tokens: int, num_padded: int, num_padded_max: int, device: torch.device) -> TokenLayout:
        """Real tokens first, padding after them."""
        is_padding = None
        if num_tokens < num_padded:
            is_padding = torch.arange(num_padded, device=device) >= num_tokens
        return cls(num_tokens=num_tokens, num_padded=num_padded, is_padding=is_padding, num_padded_max=num_padded_max)


def is_on_host(x: Tensor) -> bool:
    """Whether the host may look at the values without waiting for a device."""
    return x.device.type == "cpu"


def check_ids(ids: Tensor, num_experts: int, what: str) -> None:
    """Raise HocketError unless every id is DROPPED or in [0, num_experts).

    Only on a CPU: on any other device the check would make the host wait for it.
    """
    if not is_on_host(ids) or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < DROPPED or high >= num_experts:
        raise HocketError(f"{what} must be -1 or in [0, {num_experts}); found values from {low} to {high}")
