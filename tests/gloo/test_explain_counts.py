"""What `hocket explain` says a token moves is what a running engine counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from answers import greedy, settled_stats
from gloo_groups import Groups

from hocket.explain.messages import messages

Checkpoints = Callable[[str], Path]
LENGTH, ANSWER, NUM_PROMPTS = 40, 4, 4


@pytest.mark.parametrize("transport", ["allgather_reducescatter", "torch"])
def test_messages(groups: Groups, checkpoints: Checkpoints, transport: str) -> None:
    """Rows of fixed shapes: to the byte. Uneven ones go where tokens choose, so nearly as many."""
    with groups.llm(checkpoints("v2"), 2, all2all_backend=transport) as llm:
        prompts = [[(7 * i + 3 * k) % 90 + 5 for k in range(LENGTH)] for i in range(NUM_PROMPTS)]
        llm.generate(prompts, greedy(ANSWER), data_parallel_rank=[0, 1] * (NUM_PROMPTS // 2))
        ranks = settled_stats(llm)
        (said,) = (one for one in messages(llm.config) if one["is_chosen"])
        layers = sum(llm.config.model.moe.layers)
    per_token = (said["dispatch_bytes"] + said["combine_bytes"]) * layers
    counted = [rank["overlap"]["comm_bytes"] for rank in ranks]
    computed = NUM_PROMPTS // 2 * (LENGTH + ANSWER - 1)  # of each rank; a request's last token is never computed
    if transport == "torch":
        assert sum(counted) == pytest.approx(2 * computed * per_token, rel=0.15)
        return
    rows = [count / per_token for count in counted]
    # Both ranks send as many rows as the fuller one has; they are not given their requests in the same step.
    assert rows[0] == rows[1] == int(rows[0])
    assert computed <= rows[0] <= 2 * computed
