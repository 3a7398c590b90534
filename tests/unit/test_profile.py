"""The step that a GPU's memory is measured with: as many tokens as allowed, in prompts with blocks of their own."""

from __future__ import annotations

import pytest
import torch

from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.worker.inputs import build_inputs
from hocket.worker.profile import batch_of, split_sizes


@pytest.mark.parametrize(
    ("max_len", "tokens", "lens"), [(100, 350, [100, 100, 100, 50]), (64, 128, [64, 64]), (900, 20, [20])]
)
def test_the_largest_batch(max_len: int, tokens: int, lens: list[int]) -> None:
    given = {"max_model_len": max_len, "max_num_batched_tokens": tokens, "max_num_seqs": 4, "block_size": 16}
    config = resolve(Options.from_dict(given | {"device": "cpu"}))
    batch = batch_of(config, tokens)
    assert [row.num_tokens for row in batch.requests] == lens
    assert (batch.num_tokens, batch.phase) == (tokens, "prefill")
    inputs = build_inputs(batch, batch.num_tokens, 16, torch.device("cpu"))
    assert inputs.token_ids.tolist() == list(range(tokens))
    assert inputs.layout.num_padded_max == tokens
    slots = inputs.attention.slot_mapping.tolist()
    assert len(set(slots)) == tokens
    assert max(slots) < 16 * sum(len(row.block_ids) for row in batch.requests)


def test_steps_that_are_split_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each size that may take other kernels one, and none where no step is split."""

    def sizes(**options: object) -> list[int]:
        given = {"max_num_batched_tokens": 2000, "data_parallel_size": 2, "enable_expert_parallel": True}
        return split_sizes(resolve(Options.from_dict(given | options | {"device": "cpu"})))

    assert sizes() == []
    assert sizes(enable_dbo=True) == [2000, 1000]
    assert sizes(enable_dbo=True, dbo_prefill_token_threshold=125) == [2000, 1000, 500, 250, 125]
    assert sizes(enable_dbo=True, dbo_prefill_token_threshold=2001) == []
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    assert sizes(max_num_batched_tokens=8, max_num_seqs=8) == [8, 4]
