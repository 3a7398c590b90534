"""Cuts a batch's tensors into ubatches and joins results again. Every field is treated as its declaration says.

Shapes: T tokens, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.overlap.slices import Cut, UBatchSlice

T = TypeVar("T", Tensor, tuple[Any, ...])
S = TypeVar("S", AttentionMetadata, UBatchInputs)


def split_inputs(inputs: UBatchInputs, cut: Cut) -> tuple[UBatchInputs, ...]:
    """One UBatchInputs per slice of `cut`: the ubatch's real tokens (possibly none), no padding rows of its own."""
    return tuple(
        _slice(
            inputs,
            real,
            attention=slice_attention(inputs.attention, real),
            layout=TokenLayout.of(real.num_tokens, real.num_tokens, padded.num_tokens, inputs.token_ids.device),
        )
        for real, padded in zip(cut.real, cut.padded, strict=True)
    )


def slice_attention(meta: AttentionMetadata, part: UBatchSlice) -> AttentionMetadata:
    """The metadata of the tokens and requests in `part`.

    Starts are re-based to the slice. Where the slice ends inside a request, that request's context is shorter by its
    tokens that come later; the batch's own tensors are not changed.
    """
    starts = meta.query_start_loc_cpu
    begin, end = part.token_start, part.token_stop
    first, last = part.request_start, part.request_stop
    bounds = [min(max(s, begin), end) - begin for s in starts[first : last + 1]] if last > first else [0]
    seq_lens = list(meta.seq_lens_cpu[first:last])
    if seq_lens:
        seq_lens[-1] -= max(starts[last] - end, 0)
    device = meta.seq_lens.device
    return _slice(
        meta,
        part,
        query_start_loc=torch.tensor(bounds, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_start_loc_cpu=tuple(bounds),
        seq_lens_cpu=tuple(seq_lens),
        max_query_len=max((b - a for a, b in pairwise(bounds)), default=0),
        max_seq_len=meta.max_seq_len,
        num_tokens=part.num_tokens,
    )


def _slice(whole: S, part: UBatchSlice, **rebuilt: Any) -> S:
    """A copy of `whole` with each field cut by its rule; `rebuilt` fields are given and take precedence."""
    values = {}
    for field in fields(whole):
        value, rule = getattr(whole, field.name), field.metadata["sliced"]
        if field.name in rebuilt:
            values[field.name] = rebuilt.pop(field.name)
        elif rule == "tokens":
            values[field.name] = None if value is None else value[..., part.token_start : part.token_stop]
        elif rule == "requests":
            values[field.name] = value[part.request_start : part.request_stop]
        elif rule == "shared":
            values[field.name] = value
        else:
            raise AssertionError(f"{type(whole).__name__}.{field.name} is rebuilt for each ubatch, but nobody does")
    assert not rebuilt, f"no such fields: {', '.join(rebuilt)}"
    return type(whole)(**values)


def join(results: Sequence[T]) -> T:
    """Results of the ubatches in order as the whole batch's [T, …]; tuples (auxiliary outputs) part by part."""
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(join(parts) for parts in zip(*results, strict=True))
    return torch.cat(list(results))
