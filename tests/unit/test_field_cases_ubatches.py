"""Situations that have broken dual batch overlap elsewhere, below the engine. Each test is named by its row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.attention.base import AttentionMetadata, Sliceable, sliced
from hocket.config.engine import OverlapConfig
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.overlap import vote
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import split_inputs
from hocket.overlap.vote import Reason
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, ScheduledRequest
from hocket.ubatch import scratch
from hocket.ubatch.baton import GreenletBaton, ThreadBaton
from hocket.ubatch.scratch import PerUBatch

CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)


def inputs_of(parts: Sequence[tuple[int, int]]) -> UBatchInputs:
    """Requests as (tokens computed before, tokens of this step); every entry of every field tells where it is from."""
    ends = list(itertools.accumulate((count for _, count in parts), initial=0))
    seq_lens = [start + count for start, count in parts]
    num_tokens, num_requests = ends[-1], len(parts)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.arange(num_requests * 5, dtype=torch.int32).view(num_requests, 5),
        block_table_cpu=torch.arange(num_requests * 5, dtype=torch.int32).view(num_requests, 5),
        slot_mapping=torch.arange(num_tokens) + 1000,
        query_start_loc_cpu=tuple(ends),
        seq_lens_cpu=tuple(seq_lens),
        max_query_len=max(count for _, count in parts),
        max_seq_len=max(seq_lens),
        num_tokens=num_tokens,
    )
    layout = TokenLayout.of(num_tokens, num_tokens, num_tokens, CPU)
    positions = torch.tensor([start + i for start, count in parts for i in range(count)])
    return UBatchInputs(token_ids=torch.arange(num_tokens) + 7, positions=positions, attention=meta, layout=layout)


def glued(rule: str, pieces: list[Any], cut_before: list[bool]) -> Any:
    """The whole from its pieces, by the rule of a field; cut_before: the piece starts inside a request."""
    if rule in ("tokens", "tokens_last"):
        return torch.cat(pieces, dim=0 if rule == "tokens" else -1)
    if rule == "requests":
        whole: list[Any] = []
        for piece, is_cut in zip(pieces, cut_before, strict=True):
            del whole[len(whole) - is_cut :]  # a request cut in two is in both pieces; the later one has all of it
            whole += list(piece)
        return tuple(whole) if isinstance(pieces[0], tuple) else torch.stack(whole)
    assert rule == "shared"
    assert all(piece is pieces[0] for piece in pieces)
    return pieces[0]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


REBUILT = {
    AttentionMetadata: {"query_start_loc", "query_start_loc_cpu", "max_query_len", "max_seq_len", "num_tokens"},
    UBatchInputs: {"attention", "layout"},
}
"""Fields that are made anew for each ubatch: checked one by one below."""


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8), st.integers(2, 4))
def test_r004_every_field_cut_and_put_together_again_is_what_it_was(parts: list[tuple[int, int]], n: int) -> None:
    whole = inputs_of(parts)
    starts = {0, *itertools.accumulate(count for _, count in parts)}
    cut = cut_batch([count for _, count in parts], equal_bounds(whole.attention.num_tokens, n))
    kept = [(part, piece) for part, piece in zip(cut.real, split_inputs(whole, cut), strict=True) if part.num_tokens]
    cut_before = [part.token_start not in starts for part, _ in kept]
    checked = set()
    for kind, original, pieces in (
        (UBatchInputs, whole, [piece for _, piece in kept]),
        (AttentionMetadata, whole.attention, [piece.attention for _, piece in kept]),
    ):
        for name, rule in kind.slicing_rules().items():
            if rule == "rebuilt":
                assert name in REBUILT[kind], f"{name} is rebuilt: say here how it is checked"
                continue
            found = glued(rule, [getattr(piece, name) for piece in pieces], cut_before)
            assert same(found, getattr(original, name)), name
            checked.add(name)
    assert {"token_ids", "positions", "slot_mapping", "seq_lens", "block_table"} <= checked
    lens = [[b - a for a, b in itertools.pairwise(piece.attention.query_start_loc_cpu)] for _, piece in kept]
    assert sum(map(sum, lens)) == whole.attention.num_tokens
    for (part, piece), query_lens in zip(kept, lens, strict=True):
        meta = piece.attention
        assert meta.query_start_loc.tolist() == list(meta.query_start_loc_cpu)
        assert meta.num_tokens == piece.layout.num_tokens == part.num_tokens == sum(query_lens)
        assert meta.max_query_len == max(query_lens)
        assert meta.max_seq_len >= max(meta.seq_lens_cpu)


def test_r004_a_field_without_a_rule_or_a_rebuild_cannot_be_forgotten() -> None:
    with pytest.raises(TypeError, match=r"More\.extra has no slicing rule"):

        @dataclass(frozen=True, kw_only=True)
        class More(UBatchInputs):
            extra: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Rebuilt(UBatchInputs):
        extra: int = sliced("rebuilt")

    whole = inputs_of([(0, 4)])
    grown = Rebuilt(**{field.name: getattr(whole, field.name) for field in fields(whole)}, extra=1)
    with pytest.raises(AssertionError, match=r"extra is rebuilt for each ubatch, but nobody does"):
        split_inputs(grown, cut_batch([4], (2, 4)))
    assert all(issubclass(kind, Sliceable) for kind in REBUILT)


@pytest.mark.parametrize("n", [2, 3])
def test_r003_ubatches_share_no_metadata(n: int) -> None:
    """Different requests and lengths in each; what one ubatch could write, the other does not read."""
    whole = inputs_of([(3, length) for length in LENGTHS])
    before = whole.attention.seq_lens.clone()
    pieces = split_inputs(whole, cut_batch(LENGTHS, equal_bounds(sum(LENGTHS), n)))
    assert len({piece.attention.query_start_loc_cpu for piece in pieces}) == n
    for first, second in itertools.combinations(pieces, 2):
        assert first.attention is not second.attention
        assert first.layout is not second.layout
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            a, b = getattr(first.attention, name), getattr(second.attention, name)
            a_end, b_end = (x.data_ptr() + x.nbytes for x in (a, b))
            assert a_end <= b.data_ptr() or b_end <= a.data_ptr(), name
    for piece in pieces:
        piece.attention.seq_lens.zero_()
    assert torch.equal(whole.attention.seq_lens, before)


def batch_of(num_tokens: int) -> Batch:
    if not num_tokens:
        return Batch()
    request = Request(EngineRequest("r", [3] * num_tokens, SamplingParams()))
    row = ScheduledRequest(
        request=request, start=0, num_tokens=num_tokens, needs_sample=True, is_prefill=True, block_ids=[0]
    )
    return Batch((row,), num_tokens, num_tokens)


@pytest.mark.parametrize(
    ("sizes", "forced", "reason", "bounds"),
    [
        ((1, 1), False, Reason.BELOW_THRESHOLD, (1,)),
        ((1, 0), False, Reason.BELOW_THRESHOLD, (1,)),
        ((2, 1), False, Reason.BELOW_THRESHOLD, (2,)),
        ((2, 2), False, Reason.SPLIT, (1, 2)),
        ((0, 8), False, Reason.SPLIT, (4, 8)),
        ((8, 1), False, Reason.BELOW_THRESHOLD, (8,)),
        ((1, 1), True, Reason.SPLIT, (0, 1)),
        ((2, 1), True, Reason.SPLIT, (1, 2)),
        ((0, 0), True, Reason.NO_WORK, (0,)),
    ],
)
def test_r030_r031_r042_the_vote_on_small_batches(
    sizes: tuple[int, int], forced: bool, reason: Reason, bounds: tuple[int, ...]
) -> None:
    """From the table alone, whoever looks at it."""
    policy = OverlapConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=2, force_split=forced)
    table = [vote.facts(batch_of(n), step=1, digest=2, num_unfinished=int(n > 0)) for n in sizes]
    plan = vote.decide(table, policy)
    assert (plan.reason, plan.bounds) == (reason, bounds)
    mirrored = vote.decide(table[::-1], policy)
    assert replace(mirrored, num_tokens=sizes) == plan


@pytest.mark.parametrize("baton_kind", [GreenletBaton, ThreadBaton])
def test_r006_r093_per_ubatch_values_are_each_ubatchs_own(
    monkeypatch: pytest.MonkeyPatch, baton_kind: type[GreenletBaton | ThreadBaton]
) -> None:
    """Written before a hand-over, read after it, while the others write theirs; the next step finds them again."""
    baton, made = baton_kind(3, 10.0), itertools.count()
    mine: ContextVar[Any] = ContextVar("mine", default=None)
    monkeypatch.setattr(scratch, "current", mine.get)
    kept = PerUBatch(lambda: next(made))
    seen: list[list[int]] = [[] for _ in range(3)]

    def body(idx: int) -> None:
        mine.set(SimpleNamespace(idx=idx))
        for _ in range(4):
            kept.value += 100 * (idx + 1)
            baton.hand_over(idx)
            seen[idx].append(kept.value)

    for _ in range(2):
        outcomes = baton.run([functools.partial(body, idx) for idx in range(3)])
        assert [outcome.error for outcome in outcomes] == [None] * 3
    baton.close()
    assert seen == [[idx + 100 * (idx + 1) * turn for turn in range(1, 9)] for idx in range(3)]
    mine.set(None)
    assert kept.value == seen[0][-1], "without overlap it is the first ubatch's"
