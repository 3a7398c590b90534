"""Slicing a batch's tensors and joining them again gives the batch back, field by field, by declaration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.attention.base import AttentionMetadata, Sliceable, sliced
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.overlap.slices import Cut, UBatchSlice, cut_batch, equal_bounds
from hocket.overlap.views import join, slice_fields, split_inputs

CPU = torch.device("cpu")
Parts = list[tuple[int, int]]
"""Requests as (tokens computed before, tokens of this step)."""


def make_attention(parts: Parts) -> AttentionMetadata:
    starts = [0]
    for _, count in parts:
        starts.append(starts[-1] + count)
    seq_lens = [start + count for start, count in parts]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.arange(len(parts) * 3, dtype=torch.int32).view(len(parts), 3),
        block_table_cpu=torch.arange(len(parts) * 3, dtype=torch.int32).view(len(parts), 3),
        slot_mapping=torch.arange(starts[-1]) + 100,
        query_start_loc_cpu=tuple(starts),
        seq_lens_cpu=tuple(seq_lens),
        max_query_len=max((count for _, count in parts), default=0),
        max_seq_len=max(seq_lens, default=0),
        num_tokens=starts[-1],
    )


def values_of(parts: Parts) -> dict[str, Any]:
    """What every kind of inputs has."""
    num_tokens = sum(count for _, count in parts)
    return {
        "token_ids": torch.arange(num_tokens) * 7,
        "positions": torch.tensor([start + i for start, count in parts for i in range(count)], dtype=torch.int64),
        "attention": make_attention(parts),
        "layout": TokenLayout.of(num_tokens, num_tokens, num_tokens, CPU),
    }


def make_inputs(parts: Parts) -> UBatchInputs:
    return UBatchInputs(**values_of(parts))


PARTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=8)


@st.composite
def cuts(draw: st.DrawFn, parts: Parts) -> Cut:
    """Into 1 to 4 equal parts, or with this rank's own tokens cut anywhere."""
    lens, n = [count for _, count in parts], draw(st.integers(1, 4))
    inner = draw(st.one_of(st.none(), st.lists(st.integers(0, sum(lens)), min_size=n - 1, max_size=n - 1)))
    if inner is None:
        return cut_batch(lens, equal_bounds(sum(lens) + draw(st.integers(0, 12)), n))
    ends = (*sorted(inner), sum(lens))
    return cut_batch(lens, ends, ends)


# -- joining again, knowing nothing but the rules -------------------------------------------------------------------


def each(values: Sequence[Any], together: Callable[[list[Tensor]], Tensor]) -> Any:
    """`together` of the tensors in `values`, part by part of tuples and mappings; None of Nones."""
    first = values[0]
    if isinstance(first, dict):
        return {name: each([value[name] for value in values], together) for name in first}
    if isinstance(first, tuple):
        return tuple(each(part, together) for part in zip(*values, strict=True))
    assert all((value is None) == (first is None) for value in values)
    return None if first is None else together(list(values))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def is_continued(cut: Cut, request: int, idx: int) -> bool:
    """Whether a later ubatch than `idx` has the request too."""
    return any(part.request_start <= request < part.request_stop for part in cut.real[idx + 1 :])


def joined(pieces: Sequence[Sliceable], cut: Cut, name: str, rule: str) -> Any:
    """One field of the batch from those of its pieces; of a request that was cut the last entry counts."""
    values = [getattr(piece, name) for piece in pieces]
    if rule == "shared":
        assert all(value is values[0] for value in values)
        return values[0]
    if rule != "requests":
        return each(values, lambda tensors: torch.cat(tensors, -1 if rule == "tokens_last" else 0))
    kept = [
        [not is_continued(cut, r, idx) for r in range(part.request_start, part.request_stop)]
        for idx, part in enumerate(cut.real)
    ]
    if isinstance(values[0], tuple) and not any(isinstance(part, Tensor) for part in values[0]):
        return tuple(v for value, keep in zip(values, kept, strict=True) for v, k in zip(value, keep, strict=True) if k)
    return each(values, lambda tensors: torch.cat([t[k] for t, k in zip(tensors, kept, strict=True)]))


def joined_attention(pieces: Sequence[AttentionMetadata], cut: Cut) -> dict[str, Any]:
    """Every field. (A new one that is to be rebuilt has to be added here: without it this fails.)"""
    lens: dict[int, int] = {}
    for piece, part in zip(pieces, cut.real, strict=True):
        assert piece.query_start_loc.tolist() == list(piece.query_start_loc_cpu)
        assert piece.seq_lens.tolist() == list(piece.seq_lens_cpu)
        counts = [end - begin for begin, end in pairwise(piece.query_start_loc_cpu)]
        assert piece.max_query_len == max(counts, default=0)
        assert piece.num_tokens == sum(counts) == part.num_tokens
        for request, count in zip(range(part.request_start, part.request_stop), counts, strict=True):
            lens[request] = lens.get(request, 0) + count
    starts = [0]
    for request in sorted(lens):
        starts.append(starts[-1] + lens[request])
    rebuilt = {
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "query_start_loc_cpu": tuple(starts),
        "max_query_len": max(lens.values(), default=0),
        "max_seq_len": max(piece.max_seq_len for piece in pieces),
        "num_tokens": sum(piece.num_tokens for piece in pieces),
    }
    rules = AttentionMetadata.slicing_rules()
    return {n: rebuilt[n] if rule == "rebuilt" else joined(pieces, cut, n, rule) for n, rule in rules.items()}


# -- properties -----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(PARTS, st.data())
def test_slices_join_to_the_batch(parts: Parts, data: st.DataObject) -> None:
    whole, cut = make_inputs(parts), data.draw(cuts(parts))
    pieces = split_inputs(whole, cut)
    untouched = values_of(parts)["attention"]
    for name, value in joined_attention([piece.attention for piece in pieces], cut).items():
        assert same(value, getattr(whole.attention, name)), name
        assert same(getattr(untouched, name), getattr(whole.attention, name)), f"the batch's own {name} was changed"
    for name, rule in UBatchInputs.slicing_rules().items():
        if rule != "rebuilt":
            assert same(joined(pieces, cut, name, rule), getattr(whole, name)), name
    for piece, real, padded in zip(pieces, cut.real, cut.padded, strict=True):
        assert piece.layout == TokenLayout.of(real.num_tokens, real.num_tokens, padded.num_tokens, CPU)
        # Each request's context ends with its last token of this ubatch.
        ends = piece.positions[torch.tensor([e - 1 for e in piece.attention.query_start_loc_cpu[1:]]).long()]
        assert piece.attention.seq_lens_cpu == tuple((ends + 1).tolist())


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "none": lambda x: None,
    "tuple": lambda x: (x, x + 1, x.float()),
    "mapping": lambda x: {"hidden": x, "residual": (x * 2, x * 3)},
}


@settings(max_examples=150, deadline=None)
@given(
    PARTS,
    st.lists(
        st.tuples(st.sampled_from(["tokens", "tokens_last", "requests", "shared"]), st.sampled_from(list(SHAPES))),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 3),
    st.data(),
)
def test_any_metadata_joins_to_itself(
    parts: Parts, declared: list[tuple[str, str]], width: int, data: st.DataObject
) -> None:
    """Of any class, with fields of any rule: tensors of one or two dimensions, tuples and mappings of them, None."""
    rules = {f"field{i}": rule for i, (rule, _) in enumerate(declared)}
    namespace = {"__annotations__": dict.fromkeys(rules, Any)} | {name: sliced(rule) for name, rule in rules.items()}
    kind = dataclass(frozen=True, kw_only=True)(type("Drawn", (Sliceable,), namespace))
    num_tokens = sum(count for _, count in parts)
    rows = {"tokens": num_tokens, "tokens_last": num_tokens, "requests": len(parts), "shared": 5}
    values = {}
    for name, (rule, shape) in zip(rules, declared, strict=True):
        tensor = torch.arange(rows[rule] * width).view(rows[rule], width)
        values[name] = SHAPES[shape](tensor.T if rule == "tokens_last" else tensor)
    cut = data.draw(cuts(parts))
    pieces = [slice_fields(kind(**values), part) for part in cut.real]
    for name, rule in rules.items():
        assert same(joined(pieces, cut, name, rule), values[name])


# -- what later models bring ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaterInputs(UBatchInputs):
    """Embeddings instead of token ids, positions in three dimensions, what the stage or the model before hands on."""

    token_ids: Tensor | None = sliced("tokens")  # noqa: RUF009
    inputs_embeds: Tensor = sliced("tokens")  # noqa: RUF009
    intermediate: dict[str, Tensor] = sliced("tokens")  # noqa: RUF009
    auxiliary: tuple[Tensor, ...] = sliced("tokens")


@settings(max_examples=100, deadline=None)
@given(PARTS, st.data())
def test_later_inputs_are_cut_with_the_batch(parts: Parts, data: st.DataObject) -> None:
    values = values_of(parts)
    num_tokens = values["attention"].num_tokens
    states = torch.arange(num_tokens * 4).view(num_tokens, 4)
    values |= {
        "token_ids": None,
        "positions": torch.stack([values["positions"] + 100 * axis for axis in range(3)]),
        "inputs_embeds": states,
        "intermediate": {"hidden": states + 1, "residual": states + 2},
        "auxiliary": (states + 3, states + 4),
    }
    whole, cut = LaterInputs(**values), data.draw(cuts(parts))
    pieces = split_inputs(whole, cut)
    assert join([piece.inputs_embeds for piece in pieces]).equal(states)
    assert same(join([piece.intermediate for piece in pieces]), whole.intermediate)
    assert same(join([piece.auxiliary for piece in pieces]), whole.auxiliary)
    for piece, part in zip(pieces, cut.real, strict=True):
        assert isinstance(piece, LaterInputs)
        assert piece.token_ids is None
        assert piece.positions.equal(whole.positions[:, part.token_start : part.token_stop])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(2, 4), st.integers(0, 3), st.integers(2, 4))
def test_a_uniform_decode_stays_one_in_every_ubatch(past: list[int], query: int, more: int, n: int) -> None:
    """So that a graph for that many tokens per request fits each of them, and no draft is verified in two halves."""
    whole = make_inputs([(start, query) for start in past])
    bounds = equal_bounds((len(past) + more) * query, n, query)
    pieces = split_inputs(whole, cut_batch([query] * len(past), bounds))
    for meta in (piece.attention for piece in pieces):
        assert meta.query_start_loc_cpu == tuple(range(0, meta.num_tokens + 1, query))
        assert meta.max_query_len in (0, query)
    assert [length for piece in pieces for length in piece.attention.seq_lens_cpu] == [start + query for start in past]


def test_what_is_to_be_rebuilt_is_never_copied() -> None:
    whole = make_inputs([(0, 4)])
    part = UBatchSlice(0, 2, 0, 1)
    with pytest.raises(AssertionError, match=r"UBatchInputs\.attention is rebuilt"):
        slice_fields(whole, part, layout=whole.layout)
    with pytest.raises(AssertionError, match="no such fields: layuot"):
        slice_fields(whole, part, attention=whole.attention, layout=whole.layout, layuot=None)


def test_no_ubatch_shares_metadata_with_another() -> None:
    first, second = split_inputs(make_inputs([(0, 4), (2, 4)]), cut_batch([4, 4], (4, 8)))
    for field in fields(AttentionMetadata):
        a, b = getattr(first.attention, field.name), getattr(second.attention, field.name)
        assert not isinstance(a, Tensor) or a.data_ptr() != b.data_ptr(), field.name


def test_tuples_are_joined_part_by_part() -> None:
    hidden, extra = join([(torch.ones(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))])
    assert hidden.shape == (3, 3)
    assert extra.tolist() == [0, 0, 1]
