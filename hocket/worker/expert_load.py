"""Which experts this rank's tokens choose, from a few steps: a decaying mean over sampled ones. Knows no other rank.

Off until it is first asked for. Then one step of EVERY is counted, the same one on all ranks, so that what it costs is
little of all steps. Steps that replay a CUDA graph are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.moe.layer import MoELayer

EVERY = 32
"""Steps from one counted one to the next."""
DECAY = 0.95
"""What a counted step weighs when the next one is counted: the mean is over the last 20 or so."""


class ExpertLoad:
    """Of the sparse layers `layers`, in order."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._sums: Tensor | None = None  # fp32 [L, E + 1], the last column for slots of no expert
        self._weight = 0.0
        self._counts = False

    def begin_step(self, step: int) -> None:
        """Step number `step`, the same on all ranks, is about to run."""
        if self._sums is None:
            return
        counts = step % EVERY == 0
        if counts:
            self._sums *= DECAY
            self._weight = self._weight * DECAY + 1.0
        if counts is not self._counts:
            self._counts = counts
            for layer, row in zip(self._layers, self._sums, strict=True):
                layer.sample_expert_load(row if counts else None)

    def snapshot(self) -> dict[str, Any]:
        """{"num_layers", "num_experts", "values": fp32 [L, E] as bytes}: choices of a step, mean over the counted ones.

        Empty until a step was counted; the first call begins to count.
        """
        if not self._layers:
            return {}
        if self._sums is None:
            router = self._layers[0].router
            shape = len(self._layers), router.config.num_experts + 1
            self._sums = torch.zeros(shape, dtype=torch.float32, device=router.weight.device)
        if not self._weight:
            return {}
        mean = (self._sums[:, :-1] / self._weight).cpu().contiguous()
        return {"num_layers": len(mean), "num_experts": mean.shape[1], "values": mean.numpy().tobytes()}
