"""Every step split, also on one rank and with fewer tokens than ubatches: still the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gloo_groups import Groups

from hocket.request import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PROMPTS = [[5], [6, 7, 8], list(range(10, 50)), [9] * 7, list(range(10, 45))]


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
@pytest.mark.parametrize(("ranks", "ubatches"), [(1, 2), (1, 3), (2, 2), (3, 4)])
def test_forced(
    groups: Groups,
    checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    ubatches: int,
    executor: str,
) -> None:
    options = {"block_size": 4, "long_prefill_token_threshold": 11, "max_model_len": 64}
    with groups.llm(checkpoints("v3"), ranks, **options) as llm:
        reference = llm.generate(PROMPTS, PARAMS)
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", str(ubatches))
    with groups.llm(checkpoints("v3"), ranks, ubatch_executor=executor, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            ours = llm.generate(PROMPTS, PARAMS)
            for mine, other in zip(ours, reference, strict=True):
                assert mine.outputs[0].token_ids == other.outputs[0].token_ids
                assert mine.outputs[0].cumulative_logprob == pytest.approx(
                    other.outputs[0].cumulative_logprob, abs=1e-4
                )
                assert mine.prompt_logprobs is not None
                assert len(mine.prompt_logprobs) == len(mine.prompt_token_ids)
        for rank in llm.stats():
            busy = rank["steps"] - sum(rank["overlap"]["reasons"].get("idle", {}).values())
            assert rank["overlap"]["split"] >= busy > 0
