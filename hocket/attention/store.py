"""Triton kernels that store a step's rows in the paged cache. Know nothing of attention; rows with slot −1 are left
out, without the host knowing which these are.

Legend: T rows, G key/value heads, C head width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def store_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Store the first rows of key and value [T, G, C] (a row's heads lie together) at `slots`, int64, distinct
    where not −1; cache [2, blocks, block_size, G, C]."""
    keys, values = cache.flatten(1, 2).flatten(2).unbind(0)
    _store(slots, keys, key.flatten(1), values, value.flatten(1))


def store_latent(cache: Tensor, latent: Tensor, slots: Tensor) -> None:
    """Store the first rows of `latent` [T, width] at `slots`, int64, distinct where not −1; cache [blocks, block_size,
    width]."""
    rows = cache.flatten(0, 1)
    _store(slots, rows, latent, rows, None)


def _store(slots: Tensor, first: Tensor, x: Tensor, second: Tensor, y: Tensor | None) -> None:
    """Rows of x [T, width] to `first` [slots, width], and of y, if there is one, to `second`."""
    if len(slots) == 0:
        return
    assert x.stride(1) == 1
    assert y is None or y.stride(1) == 1
    other = x if y is None else y
    width = x.shape[1]
    grid = (len(slots), 1 if y is None else 2)
    strides = first.stride(0), x.stride(0), other.stride(0)
    _store_rows[grid](slots, first, x, second, other, *strides, WIDTH=width, BLOCK=triton.next_power_of_2(width))


@triton.jit  # type: ignore[untyped-decorator]
def _copy_row(target, source, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    tl.store(target + columns, tl.load(source + columns, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(  # type: ignore[no-untyped-def]
    slots,
    first,
    x,
    second,
    y,
    slot_stride,
    x_stride,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        if tl.program_id(1) == 0:
            _copy_row(first + slot * slot_stride, x + row * x_stride, WIDTH, BLOCK)
        else:
            _copy_row(second + slot * slot_stride, y + row * y_stride, WIDTH, BLOCK)
