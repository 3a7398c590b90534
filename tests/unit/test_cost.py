"""Costs against torch's own count of a model's FLOPs; wished cuts against trying every cut."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import checkpoints as maker
import pytest
import torch
from batches import batch_of, batches
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import PagedRun, load
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hocket.overlap.cost import TokenCost, wished_cuts
from hocket.scheduler.batch import Batch


def counted(run: PagedRun, name: str, num_tokens: int) -> int:
    """FLOPs that torch counts in all matrix products of one step's layers. (It knows no fused attention on a CPU.)"""
    inputs = run.inputs([(name, [7] * num_tokens)])
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run.model(inputs, run.caches)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ["qwen3", "qwen3-dense-layer", "v2", "v3"])
def test_costs_are_the_flops_of_the_model(checkpoints: Path, name: str) -> None:
    run = PagedRun(load(maker.make(name, checkpoints)))
    config = run.model.config
    cost = TokenCost.of(config)
    # Latent attention hands its kernels values as wide as the keys, which we count at their own width.
    per_head = 2 * config.num_heads * config.num_layers
    mla = config.mla
    wider_decode = per_head * mla.qk_rope_head_dim if mla else 0
    wider_prefill = per_head * (mla.qk_head_dim - mla.v_head_dim) if mla else 0
    # Without a mask's help the plain kernel compares each of 33 rows with all 33.
    assert counted(run, "a", 33) == 33 * cost.linear + 33 * 33 * (cost.prefill_context + wider_prefill)
    for context in (34, 35):
        assert counted(run, "a", 1) == cost.linear + context * (cost.decode_context + wider_decode)


COSTS = st.builds(TokenCost, st.integers(1, 1000), st.integers(0, 100), st.integers(0, 100))


def token_costs(batch: Batch, cost: TokenCost) -> list[int]:
    """Of each token, one by one."""
    return [
        cost.linear + (cost.decode_context if row.num_tokens == 1 else cost.prefill_context) * (position + 1)
        for row in batch.requests
        for position in range(row.start, row.start + row.num_tokens)
    ]


@settings(max_examples=300, deadline=None)
@given(batches(), COSTS, st.integers(2, 4))
def test_each_wished_cut_is_the_nearest_to_its_share(batch: Batch, cost: TokenCost, n: int) -> None:
    wish = wished_cuts(batch, cost, n)
    sums = [0, *accumulate(token_costs(batch, cost))]
    queries = {row.num_tokens for row in batch.requests}
    is_uniform = len(queries) == 1 and not any(row.is_prefill for row in batch.requests)
    step = queries.pop() if is_uniform else 1
    assert wish.cost == -(-sums[-1] // cost.linear)
    ends = (0, *wish.cuts, batch.num_tokens)
    assert list(ends) == sorted(ends)
    num_units = batch.num_tokens // step
    for i, cut in enumerate(wish.cuts, start=1):
        if num_units >= n:  # no part is empty
            allowed = [step * units for units in range(i, num_units - n + i + 1)]
            assert cut == min(allowed, key=lambda t: (abs(n * sums[t] - i * sums[-1]), t))
        assert cut % step == 0


@settings(max_examples=200, deadline=None)
@given(batches(), COSTS)
def test_two_parts_are_as_equal_as_they_can_be(batch: Batch, cost: TokenCost) -> None:
    if batch.num_tokens < 2 or batch.uniform_query > 1:
        return
    [cut] = wished_cuts(batch, cost, 2).cuts
    costs = token_costs(batch, cost)
    worst = [max(sum(costs[:t]), sum(costs[t:])) for t in range(len(costs) + 1)]
    assert worst[cut] == min(worst)


def test_a_long_prompt_is_cut_behind_its_middle_and_a_long_context_before() -> None:
    cost = TokenCost(linear=100, decode_context=1, prefill_context=1)
    first, second = wished_cuts(batch_of((400, 0, 400)), cost, 3).cuts
    assert first > second - first > 400 - second  # early tokens see less
    assert wished_cuts(batch_of((9, 900, 1), *[(2, 2, 1)] * 9), cost, 2).cuts[0] < 5
    assert wished_cuts(batch_of(*[(2, 2, 1)] * 10), cost, 2).cuts == (5,)
    assert wished_cuts(batch_of(), cost, 3).cuts == (0, 0)
