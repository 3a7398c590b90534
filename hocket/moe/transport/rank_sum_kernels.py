"""The Triton kernel behind `rank_sums.py`. Shapes as there."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches

BLOCK = 1024


def add_ranks(out: Tensor, own: Tensor, parts: Tensor, rank: int) -> None:
    """out [N, D] = own + the others' parts [n, P, D], all contiguous."""
    if out.numel():
        _launch(out.numel(), parts[0].numel(), len(parts), rank)(out, own, parts)


@launches
def _launch(num_items: int, part_items: int, num_ranks: int, rank: int) -> Launch:
    return Launch(
        _add_ranks,
        (-(-num_items // BLOCK),),
        num_items,
        part_items,  # no constant: it follows the rows of the step, and each would be another kernel to compile
        NUM_RANKS=num_ranks,
        RANK=rank,
        BLOCK=BLOCK,
    )


@triton.jit
def _add_ranks(
    out,
    own,
    parts,
    num_items,
    part_items,
    NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    items = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_item = items < num_items
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        part = own if rank == RANK else parts + tl.cast(part_items, tl.int64) * rank
        total += tl.load(part + items, mask=is_item, other=0.0).to(tl.float32)
    tl.store(out + items, total.to(out.dtype.element_ty), mask=is_item)
