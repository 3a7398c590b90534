"""Triton: the gate's logits and the choice of experts, two launches. Knows nothing of ranks or of what an expert does.

Logits are fp32 sums of exact products: where x is bf16, an fp32 weight is taken apart into three bf16 numbers whose sum
it is, so that tensor cores can multiply them. The hidden width may be split between programs; the second kernel adds
their sums up in order and chooses.

Shapes: T tokens, D hidden, E experts, K top-k, G groups, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.config.moe import MoEConfig
from hocket.launch import Launch, launches
from hocket.layers.routing import DROPPED, NORM_EPS, limits_groups

TILE = 64
"""Rows, experts and hidden columns of a program's tile, at most."""
LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Splits:
    """most: of the hidden width, since the second kernel adds all of them up. programs: the width is split no further
    where there are so many."""

    most: int
    programs: int


WHOLE, IN_PIECES = Splits(16, 128), Splits(32, 264)
"""For products of one and of three pieces: the latter last so much longer that more programs pay. Measured on an
H200 with 64 to 512 rows."""
LAST = tl.constexpr((1 << 20) - 1)
"""The largest index that fits below a value in a key."""
LOWEST = tl.constexpr(-(1 << 62))
"""Below every key."""
NO_LIMIT, BEST, BEST_TWO = 0, 1, 2
"""What a group's score is: its best expert's (DeepSeek-V2) or the sum of its two best (DeepSeek-V3)."""


@triton.jit(do_not_specialize=["num_rows"])
def _logits_kernel(
    x,
    weight,
    logits,
    num_rows,
    num_experts,
    width,
    x_stride,
    columns,
    NUM_PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sums over columns [split · columns, …) of one tile: logits [S, T, E]. NUM_PIECES 0: multiply in fp32."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    split = tl.program_id(2)
    start, stop = split * columns, tl.minimum((split + 1) * columns, width)
    is_row, is_expert = row[:, None] < num_rows, expert[:, None] < num_experts
    total = tl.zeros((ROWS, EXPERTS), dtype=tl.float32)
    for first in range(start, stop, INNER):
        col = (first + tl.arange(0, INNER))[None, :]
        a = tl.load(x + row[:, None] * x_stride + col, mask=is_row & (col < stop), other=0.0)
        rest = tl.load(weight + expert[:, None] * width + col, mask=is_expert & (col < stop), other=0.0)
        rest = rest.to(tl.float32)
        if NUM_PIECES == 0:
            total = tl.dot(a.to(tl.float32), tl.trans(rest), total, input_precision="ieee")
        for _ in tl.static_range(NUM_PIECES):
            piece = rest.to(tl.bfloat16)
            total = tl.dot(a, tl.trans(piece), total)
            rest -= piece.to(tl.float32)
    out = logits + (split * num_rows + row[:, None]) * num_experts + expert[None, :]
    tl.store(out, total, mask=is_row & (expert[None, :] < num_experts))


@triton.jit
def _keys(value, index, inside):
    """int64 that sort as (value, then lowest index first); all differ, whatever the values, NaN too."""
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(inside, (order << 20) + (LAST - index), LOWEST)


@triton.jit
def _within_best_groups(
    keys, choice, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, GROUPS: tl.constexpr
):
    """keys [GROUPS, WIDTH] with LOWEST for experts outside the best groups."""
    best = keys == tl.max(keys, axis=1)[:, None]
    score = tl.sum(tl.where(best, choice, 0.0), axis=1)
    if TWO:
        rest = tl.where(best, LOWEST, keys)
        score += tl.sum(tl.where(rest == tl.max(rest, axis=1)[:, None], choice, 0.0), axis=1)
    group = tl.arange(0, GROUPS)
    group_keys = _keys(score, group, group < NUM_GROUPS)
    kept = tl.zeros((GROUPS,), dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        best_group = group_keys == tl.max(group_keys, axis=0)
        kept = tl.where(best_group, 1, kept)
        group_keys = tl.where(best_group, LOWEST, group_keys)
    return tl.where(kept[:, None] == 1, keys, LOWEST)


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    logits,
    bias,
    is_padding,
    weights,
    ids,
    num_rows,
    scaling,
    norm_eps,
    NUM_SPLITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    LIMIT: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    DROPPED: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One row: logits [S, T, E] → weights [T, K], ids [T, K]. Experts are [GROUPS, WIDTH] here, padded."""
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    expert, inside = group * GROUP_WIDTH + place, (group < NUM_GROUPS) & (place < GROUP_WIDTH)
    logit = tl.zeros((GROUPS, WIDTH), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        source = logits + (split * num_rows + row) * (NUM_GROUPS * GROUP_WIDTH)
        logit += tl.load(source + expert, mask=inside, other=0.0)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        logit = tl.where(inside, logit, float("-inf"))
        score = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    keys = _keys(choice, expert, inside)
    if LIMIT > 0:
        keys = _within_best_groups(keys, choice, NUM_GROUPS, TOP_GROUPS, LIMIT == 2, GROUPS)

    slot = tl.arange(0, SLOTS)
    weight, chosen = tl.zeros((SLOTS,), dtype=tl.float32), tl.zeros((SLOTS,), dtype=tl.int64)
    for k in range(TOP_K):
        key = tl.max(tl.max(keys, axis=1), axis=0)
        best = keys == key
        weight = tl.where(slot == k, tl.sum(tl.sum(tl.where(best, score, 0.0), axis=1), axis=0), weight)
        chosen = tl.where(slot == k, LAST - (key & LAST), chosen)
        keys = tl.where(best, LOWEST, keys)
    if NORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + norm_eps)
    if HAS_PADDING:
        chosen = tl.where(tl.load(is_padding + row) != 0, DROPPED, chosen)
    tl.store(weights + row * TOP_K + slot, weight * scaling, mask=slot < TOP_K)
    tl.store(ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: MoEConfig, is_padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `Kernels.route`, with fp32 logits whatever the weight's dtype; of equal scores the lowest expert is first."""
    logits = _logits(x, weight)
    num_splits, num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, config.top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(num_rows, config.top_k, dtype=torch.int64, device=x.device)
    launch = _choose_launch(num_splits, num_rows, num_experts, config, bias is not None, is_padding is not None)
    launch(logits, bias, is_padding, weights, ids)
    return weights, ids


@launches
def _choose_launch(
    num_splits: int, num_rows: int, num_experts: int, config: MoEConfig, has_bias: bool, has_padding: bool
) -> Launch:
    limit, num_groups = NO_LIMIT, 1
    if limits_groups(config):
        limit, num_groups = (BEST_TWO if config.topk_method == "noaux_tc" else BEST), config.num_groups
    group_width = num_experts // num_groups
    return Launch(
        _choose_kernel,
        (num_rows,),
        num_rows,
        config.routed_scaling_factor,
        NORM_EPS,
        NUM_SPLITS=num_splits,
        NUM_GROUPS=num_groups,
        GROUP_WIDTH=group_width,
        TOP_GROUPS=config.topk_groups,
        LIMIT=limit,
        TOP_K=config.top_k,
        SIGMOID=config.scoring == "sigmoid",
        NORMALISE=config.norm_topk_prob,
        HAS_BIAS=has_bias,
        HAS_PADDING=has_padding,
        DROPPED=DROPPED,
        GROUPS=triton.next_power_of_2(num_groups),
        WIDTH=triton.next_power_of_2(group_width),
        SLOTS=triton.next_power_of_2(config.top_k),
        num_warps=1,
    )


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] · weight [E, D]ᵀ as fp32 [S, T, E], to be summed over S, which depends on shapes alone."""
    (num_rows, width), num_experts = x.shape, weight.shape[0]
    stride, step = x.stride()
    assert step == 1
    num_splits, launch = _logits_launch(num_rows, num_experts, width, stride, x.dtype, weight.dtype)
    logits = torch.empty(num_splits, num_rows, num_experts, dtype=torch.float32, device=x.device)
    launch(x, weight, logits)
    return logits


@launches
def _logits_launch(
    num_rows: int, num_experts: int, width: int, stride: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[int, Launch]:
    """S, and the launch."""
    rows = min(max(int(triton.next_power_of_2(num_rows)), LEAST_ROWS), TILE)
    tiles = triton.cdiv(num_rows, rows), triton.cdiv(num_experts, TILE)
    num_pieces = 0
    if dtype == torch.bfloat16:
        num_pieces = {torch.float32: 3, torch.bfloat16: 1}.get(weight_dtype, 0)
    num_splits = _num_splits(tiles[0] * tiles[1], width, IN_PIECES if num_pieces == 3 else WHOLE)
    return num_splits, Launch(
        _logits_kernel,
        (*tiles, num_splits),
        num_rows,
        num_experts,
        width,
        stride,
        triton.cdiv(triton.cdiv(width, num_splits), TILE) * TILE,
        NUM_PIECES=num_pieces,
        ROWS=rows,
        EXPERTS=TILE,
        INNER=TILE,
    )


def _num_splits(num_tiles: int, width: int, splits: Splits) -> int:
    """The power of two that about fills a GPU with `num_tiles` tiles, each split with some work."""
    most = min(splits.most, splits.programs // max(num_tiles, 1), -(-width // TILE))
    return 1 << (max(most, 1).bit_length() - 1)
