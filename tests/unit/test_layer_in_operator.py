"""A sparse layer inside a torch operator: split steps fail by name and lose nothing else; unsplit ones work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make
from test_executor import CPU, Bench
from torch import Tensor

from hocket.errors import UBatchFailed
from hocket.moe.base import TokenLayout
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.ubatch.context import current

LAYER = 1


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A model one of whose sparse layers is called through `torch.library.custom_op`."""
    made = Bench(make("v2", tmp_path))
    layer = made.layers[LAYER]
    summands = layer.summands
    layouts: dict[int, TokenLayout] = {}

    @torch.library.custom_op("hocket_unit_test::sparse_layer", mutates_args=())
    def sparse_layer(x: Tensor) -> Tensor:
        context = current()
        out, shared = summands(x, layouts[0 if context is None else context.idx])
        return out if shared is None else out + shared

    def through_operator(x: Tensor, layout: TokenLayout) -> tuple[Tensor, None]:
        context = current()
        layouts[0 if context is None else context.idx] = layout
        return sparse_layer(x), None

    layer.summands = through_operator  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("kind", EXECUTORS)
def test_split_steps_are_refused(bench: Bench, kind: str) -> None:
    executor = UBatchExecutor(bench.model, kind, 2, 10.0, CPU)
    whole = bench.run(executor, 1)
    for _ in range(2):
        bench.transport.sent.clear()
        with pytest.raises(UBatchFailed, match=r"ubatch 0, .* inside a torch operator"):
            bench.run(executor, 2)
        expected = dict.fromkeys(("dispatch", "combine"), 2 * len(bench.layers))
        assert dict(bench.transport.sent) == expected, "every collective took place, as the other ranks expect"
        torch.testing.assert_close(bench.run(executor, 1), whole)
    executor.close()
