"""Triton kernels that store a step's rows in the paged cache. Know nothing of attention; rows with slot −1 are left
out, without the host knowing which these are.

Legend: T rows, G key/value heads, C head width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches


def store_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Store key and value [T, G, C], a row's heads beside each other, at `slots`, int64, of the first rows.

    Slot −1: nowhere. Of rows with the same slot one stays. cache [2, blocks, block_size, G, C].
    """
    keys, values = cache.unbind(0)
    _store(slots, keys, key.flatten(1), values, value.flatten(1))


def store_latent(cache: Tensor, latent: Tensor, slots: Tensor) -> None:
    """Store latent rows [T, width] at `slots` in the same way; cache [blocks, block_size, width]."""
    _store(slots, cache, latent, cache, None)


def _store(slots: Tensor, first: Tensor, x: Tensor, second: Tensor, y: Tensor | None) -> None:
    """Rows of x [T, width] to `first` [blocks, block_size, …], and of y, if there is one, to `second`."""
    if len(slots) == 0:
        return
    block, slot = first.stride()[:2]
    assert block == slot * first.shape[1], "slots must lie together"
    other = x if y is None else y
    (x_stride, x_step), (y_stride, y_step) = x.stride(), other.stride()
    assert x_step == y_step == 1
    launch = _store_launch(len(slots), x.shape[1], (slot, x_stride, y_stride), y is not None)
    launch(slots, first, x, second, other)


@launches
def _store_launch(num_slots: int, width: int, strides: tuple[int, int, int], has_second: bool) -> Launch:
    grid = (num_slots, 1 + has_second)
    return Launch(_store_rows, grid, *strides, WIDTH=width, BLOCK=int(triton.next_power_of_2(width)))


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
