"""Makes a ubatch fail while a split graph is captured (see patched_ranks.py). For tests only.

CAPTURE_PLANT is "rank ubatch stage run": in the run with this number of all that split graphs make (warm-ups, and the
one that is captured), from the sparse layer LAYER on. stage: attention, router, experts or shared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from hocket.moe.layer import MoELayer
from hocket.overlap.executor import UBatchExecutor
from hocket.ubatch.context import current

CAPTURE_PLANT = "CAPTURE_PLANT"
LAYER = 2


def install() -> None:
    UBatchExecutor.run_captured = planted(UBatchExecutor.run_captured)  # type: ignore[method-assign]


def planted(run_captured: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `run_captured`."""
    runs = 0

    def run(self: UBatchExecutor, *args: Any) -> Any:
        nonlocal runs
        rank, ubatch, stage, which = os.environ[CAPTURE_PLANT].split()
        runs += 1
        if (runs, _rank()) == (int(which), int(rank)):
            _plant(self._model, int(ubatch), stage)
        return run_captured(self, *args)

    return run


def _rank() -> int:
    """Of this process: as the launcher said, 0 in a test's own."""
    return int(sys.argv[sys.argv.index("--rank") + 1]) if "--rank" in sys.argv else 0


def _plant(model: Any, ubatch: int, stage: str) -> None:
    layer = model.layers[LAYER]
    assert isinstance(layer.mlp, MoELayer)
    module: Any = (
        layer.attention if stage == "attention" else getattr(layer.mlp, stage.replace("shared", "shared_experts"))
    )
    forward = module.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is not None and context.idx == ubatch:
            raise ValueError(f"planted in {stage}\nand more")
        return forward(*args, **kwargs)

    module.forward = fails
