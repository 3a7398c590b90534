"""Cuts a batch's tensors into ubatches and joins results again. Every field is treated as its declaration says.

Shapes: T tokens, R requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata, Sliceable
from hocket.host import sent
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.overlap.slices import Cut, UBatchSlice

T = TypeVar("T", Tensor, tuple[Any, ...], dict[str, Any])
S = TypeVar("S", bound=Sliceable)


def split_inputs(inputs: UBatchInputs, cut: Cut) -> tuple[UBatchInputs, ...]:
    """One UBatchInputs per slice of `cut`: the ubatch's real tokens (possibly none), no padding rows of its own."""
    return tuple(
        slice_fields(
            inputs,
            real,
            attention=slice_attention(inputs.attention, real),
            layout=TokenLayout.of(real.num_tokens, real.num_tokens, padded.num_tokens, inputs.positions.device),
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
    return slice_fields(
        meta,
        part,
        query_start_loc=sent(bounds, torch.int32, device),
        seq_lens=sent(seq_lens, torch.int32, device),
        query_start_loc_cpu=tuple(bounds),
        seq_lens_cpu=tuple(seq_lens),
        max_query_len=max((b - a for a, b in pairwise(bounds)), default=0),
        max_seq_len=meta.max_seq_len,
        num_tokens=part.num_tokens,
    )


def slice_fields(whole: S, part: UBatchSlice, **rebuilt: Any) -> S:
    """A copy of `whole` with each field cut by its rule; `rebuilt` fields are given and take precedence."""
    tokens, requests = slice(part.token_start, part.token_stop), slice(part.request_start, part.request_stop)
    indices: dict[str, Any] = {"tokens": tokens, "tokens_last": (..., tokens), "requests": requests}
    values = {}
    for name, rule in whole.slicing_rules().items():
        value = getattr(whole, name)
        if name in rebuilt:
            values[name] = rebuilt.pop(name)
        elif rule in indices:
            values[name] = _at(value, indices[rule])
        elif rule == "shared":
            values[name] = value
        else:
            raise AssertionError(f"{type(whole).__name__}.{name} is rebuilt for each ubatch, but nobody does")
    assert not rebuilt, f"no such fields: {', '.join(rebuilt)}"
    return type(whole)(**values)


def _at(value: Any, index: Any) -> Any:
    """`value[index]`; of a mapping or a tuple of tensors that of each part; None where there is nothing to cut."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _at(part, index) for name, part in value.items()}
    if isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value):
        return tuple(_at(part, index) for part in value)
    return value[index]


def join(results: Sequence[T]) -> T:
    """Results of the ubatches in order as the whole batch's [T, …]; tuples (auxiliary outputs) and dictionaries (a
    pipeline stage's tensors) part by part."""
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(join(parts) for parts in zip(*results, strict=True))
    if isinstance(first, dict):
        return {name: join([parts[name] for parts in results]) for name in first}
    return torch.cat(list(results))
