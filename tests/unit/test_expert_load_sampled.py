"""The sampled load of experts: which steps are counted, how the mean decays, and that nothing is counted when off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from configs import PLAIN_MOE
from test_moe_layer import HIDDEN, layout, make

from hocket.moe.layer import MoELayer
from hocket.worker.expert_load import DECAY, EVERY, ExpertLoad


def loads(found: dict[str, object]) -> np.ndarray:
    values = np.frombuffer(found["values"], np.float32)  # type: ignore[call-overload]
    return values.reshape(found["num_layers"], found["num_experts"])  # type: ignore[call-overload]


def chosen(layer: MoELayer, x: torch.Tensor) -> np.ndarray:
    _, ids = layer.router(x)
    return torch.bincount(ids.flatten(), minlength=layer.router.config.num_experts).numpy()


@torch.no_grad()
def test_every_so_many_steps_one_is_counted_and_older_ones_weigh_less() -> None:
    torch.manual_seed(0)
    layers = [make(PLAIN_MOE) for _ in range(2)]
    x = torch.randn(6, HIDDEN)
    load = ExpertLoad(layers)
    load.begin_step(0)
    for layer in layers:
        layer(x, layout(6))
    assert load.snapshot() == {}, "off until it is asked for"
    for step in range(1, 2 * EVERY + 2):
        load.begin_step(step)
        num_tokens = 6 - 2 * (step // EVERY)  # 4 in the first step counted, 2 in the second; two of 6 are padding
        for layer in layers:
            layer(x, layout(num_tokens, 6))
        if step == EVERY - 1:
            assert load.snapshot() == {}
    found = loads(load.snapshot())
    for layer, row in zip(layers, found, strict=True):
        expected = (DECAY * chosen(layer, x[:4]) + chosen(layer, x[:2])) / (DECAY + 1)
        assert row == pytest.approx(expected)
    assert all(layer._sample is None for layer in layers), "the last step was not a counted one"


@torch.no_grad()
def test_counting_for_others_goes_on_beside_it() -> None:
    torch.manual_seed(0)
    layer = make(PLAIN_MOE)
    x = torch.randn(5, HIDDEN)
    layer.count_expert_load()
    load = ExpertLoad([layer])
    load.snapshot()
    for step in range(EVERY + 1):
        load.begin_step(step)
        layer(x, layout(5))
    assert layer.expert_load is not None
    assert layer.expert_load.tolist() == (chosen(layer, x) * (EVERY + 1)).tolist()
    assert loads(load.snapshot())[0] == pytest.approx(chosen(layer, x))


def test_without_sparse_layers_there_is_none() -> None:
    load = ExpertLoad([])
    assert load.snapshot() == {}
    load.begin_step(0)
