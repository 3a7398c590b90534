"""Slicing a batch's tensors and joining them again gives the batch back, field by field, by declaration."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.attention.base import AttentionMetadata
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import join, split_inputs

CPU = torch.device("cpu")


def make_inputs(parts: list[tuple[int, int]]) -> UBatchInputs:
    """Requests as (tokens computed before, tokens of this step)."""
    starts = [0]
    for _, count in parts:
        starts.append(starts[-1] + count)
    num_tokens = starts[-1]
    seq_lens = [start + count for start, count in parts]
    positions = torch.tensor([start + i for start, count in parts for i in range(count)], dtype=torch.int64)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.arange(len(parts) * 3, dtype=torch.int32).view(len(parts), 3),
        slot_mapping=torch.arange(num_tokens) + 100,
        query_start_loc_cpu=tuple(starts),
        seq_lens_cpu=tuple(seq_lens),
        max_query_len=max((count for _, count in parts), default=0),
        max_seq_len=max(seq_lens, default=0),
        num_tokens=num_tokens,
    )
    layout = TokenLayout.of(num_tokens, num_tokens, num_tokens, CPU)
    return UBatchInputs(token_ids=torch.arange(num_tokens) * 7, positions=positions, attention=meta, layout=layout)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=8), st.integers(0, 12), st.integers(2, 4))
def test_slices_join_to_the_batch(parts: list[tuple[int, int]], more: int, n: int) -> None:
    whole = make_inputs(parts)
    num_tokens = whole.attention.num_tokens
    if num_tokens + more == 0:
        return
    cut = cut_batch([count for _, count in parts], equal_bounds(num_tokens + more, n))
    before = whole.attention.seq_lens.clone()
    pieces = split_inputs(whole, cut)
    assert torch.equal(whole.attention.seq_lens, before), "the batch's own tensors are left alone"
    assert torch.equal(join([p.token_ids for p in pieces]), whole.token_ids)
    assert torch.equal(join([p.positions for p in pieces]), whole.positions)
    assert torch.equal(join([p.attention.slot_mapping for p in pieces]), whole.attention.slot_mapping)
    for piece, real, padded in zip(pieces, cut.real, cut.padded, strict=True):
        meta, (first, last) = piece.attention, (real.request_start, real.request_stop)
        assert piece.layout.num_padded_max == padded.num_tokens
        assert meta.num_tokens == piece.layout.num_tokens == real.num_tokens
        assert meta.query_start_loc.tolist() == list(meta.query_start_loc_cpu)
        assert meta.seq_lens.tolist() == list(meta.seq_lens_cpu)
        assert torch.equal(meta.block_table, whole.attention.block_table[first:last])
        lens = [b - a for a, b in pairwise(meta.query_start_loc_cpu)]
        assert sum(lens) == real.num_tokens
        assert meta.max_query_len == max(lens, default=0)
        # Each request's context ends with its last token of this ubatch.
        ends = piece.positions[torch.tensor([e - 1 for e in meta.query_start_loc_cpu[1:]], dtype=torch.int64)]
        assert meta.seq_lens_cpu == tuple((ends + 1).tolist())


def test_tuples_are_joined_part_by_part() -> None:
    hidden, extra = join([(torch.ones(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))])
    assert hidden.shape == (3, 3)
    assert extra.tolist() == [0, 0, 1]
