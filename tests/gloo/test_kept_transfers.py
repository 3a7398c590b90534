"""Compute and communication of a step each alone, on two gloo ranks: the same rows, and the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankEnv, RankPool
from test_transports import HIDDEN, make_layer
from torch import Tensor

from hocket.config.backends import NCCL_TRANSPORTS
from hocket.dist import collectives
from hocket.dist.mesh import Mesh
from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.worker.kept_transfers import KeptTransfers, transfers_kept

CPU = torch.device("cpu")
TOKENS = ((5, 3), (4, 6))
"""Of each rank's two ubatches."""
NUM_LAYERS = 3
Parts = list[tuple[Tensor, TokenLayout]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


def made_parts(rank: int) -> Parts:
    generator = torch.Generator().manual_seed(rank)
    most = [max(pair) for pair in zip(*TOKENS, strict=True)]
    return [
        (torch.randn(count, HIDDEN, generator=generator), TokenLayout.of(count, count, padded, CPU))
        for count, padded in zip(TOKENS[rank], most, strict=True)
    ]


def run(layer: MoELayer, kept: KeptTransfers, step: str, parts: Parts, *, moves: bool) -> list[Tensor]:
    kept.select(step, moves=moves)
    out = []
    for kept.ubatch, (x, layout) in enumerate(parts):
        out.append(layer(x, layout))
    return out


@torch.inference_mode()
def check(env: RankEnv, name: str, is_emulated: bool) -> tuple[int, int, int]:
    """Bytes given to collectives while the steps ran, while their compute ran alone, and their transfers alone."""
    mesh = Mesh(rank=env.rank, world_size=2, device=CPU, ep_group=env.groups[2])
    layer = make_layer(mesh, name, "grouped_mm")
    if is_emulated:
        layer.transport = LinkEmulator(layer.transport, 10.0, 100.0)
    own, halves = layer.transport, made_parts(env.rank)
    steps, rows, moved = {"": halves[:1], "halves": halves}, [], []
    experts, all_to_all = type(layer.experts).forward, collectives.all_to_all

    def spied(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows.append(Counter(ids.flatten().tolist()))
        return experts(self, x, ids, weights)

    def counted(output: Tensor, input: Tensor, *args: Any) -> None:
        moved.append(input.nbytes)
        all_to_all(output, input, *args)

    with (
        patch.object(type(layer.experts), "forward", spied),
        patch.object(collectives, "all_to_all", counted),
        transfers_kept([layer]) as kept,
    ):
        for step, parts in steps.items():
            run(layer, kept, step, parts, moves=True)
            assert kept.num_bytes > 0
        expected, rows[:] = rows[:], []
        in_steps, moved[:] = sum(moved), []
        for step, parts in steps.items():
            for out, (x, _) in zip(run(layer, kept, step, parts, moves=False), parts, strict=True):
                assert out.shape == x.shape
                assert torch.isfinite(out).all()
        assert rows == expected, "the experts get what they got in the step that moved"
        in_compute, rows[:] = sum(moved), []
        for step in steps:
            kept.select(step, moves=False)
            kept.move(NUM_LAYERS)
        assert not rows, "nothing is computed"
    assert layer.transport is own
    return in_steps, in_compute, sum(moved) - in_compute


@torch.inference_mode()
def received_memory(env: RankEnv) -> list[bool]:
    """Whether what was received in the step is there still, after it has been received once more into other memory."""
    mesh = Mesh(rank=env.rank, world_size=2, device=CPU, ep_group=env.groups[2])
    layer = make_layer(mesh, "torch", "grouped_mm")
    seen: list[Any] = []
    experts = type(layer.experts).forward

    def spied(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append(x.untyped_storage()._weak_ref())
        return experts(self, x, ids, weights)

    with patch.object(type(layer.experts), "forward", spied), transfers_kept([layer]) as kept:
        for _ in range(2):
            run(layer, kept, "", made_parts(env.rank)[:1], moves=True)
        kept.move(2)
        return [not torch.UntypedStorage._expired(storage) for storage in seen]


def test_what_a_captured_step_reads_stays(pool: RankPool) -> None:
    assert pool.run(received_memory) == [[False, True]] * 2, "of the last layer, as its transfers"


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("name", NCCL_TRANSPORTS)
def test_each_lane_alone(pool: RankPool, name: str, is_emulated: bool) -> None:
    for in_steps, in_compute, alone in pool.run(check, name, is_emulated):
        assert in_steps > 0
        assert in_compute == 0
        assert alone == NUM_LAYERS * in_steps, "all that a layer moves, once for each layer"
