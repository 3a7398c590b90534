"""Triton kernels of absorbed latent decode over a paged cache. Know no plans, no weights, and nothing of the host.

The blocks of all contexts lie one after another, `indptr` says where each request's begin. Where contexts are about
equally long, each is cut into as many pieces. Else that row of blocks is cut into pieces of equal size, wherever
requests end, so programs have equal work whatever the lengths of contexts: then a piece has parts of one or more
requests. What covers a whole context goes to the output, other parts to a workspace, from
which a second kernel merges them. A piece has at most two of these, of the request it begins in and of the one it ends
in: they get the numbers 2 · piece and 2 · piece + 1.

A tile of tokens is read once, as keys and as values, and while it is computed the next ones are on their way. Heads are
the rows of both matrix products: for 16 of them these are the tensor cores' smallest tiles.

Legend: R requests, H heads, L latent and P rotated width, G pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _num_pieces(num_blocks, most, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Few blocks make fewer pieces than `most`: each has a tile of tokens."""
    return tl.minimum(most, tl.cdiv(num_blocks, (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE))


@triton.jit
def _cut(piece, num_blocks, num_pieces):
    """Where the piece begins in the row of all blocks."""
    return (piece.to(tl.int64) * num_blocks // num_pieces).to(tl.int32)


@triton.jit
def _piece_of(block, num_blocks, num_pieces):
    """The last piece that begins at `block` or before it."""
    return (((block + 1).to(tl.int64) * num_pieces - 1) // num_blocks).to(tl.int32)


@triton.jit
def _cut_of_row(piece, each, indptr):
    """Where the piece begins and ends, of `each` that its request is cut into."""
    row, number = piece // each, piece % each
    row_begin = tl.load(indptr + row)
    size = tl.load(indptr + row + 1) - row_begin
    return row_begin + number * size // each, row_begin + (number + 1) * size // each


@triton.jit
def _pieces_each(indptr, num_rows, num_blocks, most, ROWS: tl.constexpr):
    """How many pieces each request is cut into, where none is an eighth longer than the average; 0: the row of all
    blocks is cut, since the longest would keep all others waiting."""
    lanes = tl.arange(0, ROWS)
    is_row = lanes < num_rows
    sizes = tl.load(indptr + 1 + lanes, mask=is_row, other=0) - tl.load(indptr + lanes, mask=is_row, other=0)
    longest, shortest = tl.max(sizes, axis=0), tl.min(tl.where(is_row, sizes, 2147483647), axis=0)
    each = most // num_rows
    is_even = longest.to(tl.int64) * num_rows * 8 <= num_blocks.to(tl.int64) * 9
    return tl.where(is_even & (each * num_rows == most) & (shortest >= each), each, 0)


@triton.jit
def _tile_rows(
    indices, start, stop, block_stride, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Offsets int64 [TILE] in the cache of a context's tokens from `start` on; `indices` names its blocks. Those from
    `stop` on stand in its last block or anywhere in it."""
    lanes = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:  # contexts' parts begin with a block: a tile lies in one
        block = tl.load(indices + start // BLOCK_SIZE).to(tl.int64)
        return block * block_stride + start % BLOCK_SIZE * TOKEN_STRIDE + lanes * TOKEN_STRIDE
    else:
        near = tl.minimum(start + lanes, stop - 1)
        blocks = tl.load(indices + near // BLOCK_SIZE).to(tl.int64)
        return blocks * block_stride + near % BLOCK_SIZE * TOKEN_STRIDE


@triton.jit
def _attend(
    query,
    rotated_query,
    latents,
    rotated,
    indices,
    first,
    stop,
    factor,
    block_stride,
    TOKEN_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """query [HEADS, LATENT], rotated_query [HEADS, ROTATED] over tokens first … stop − 1 of a context: values
    [HEADS, LATENT] and the base-2 logarithm [HEADS] of the sum of exponentials. factor: scale · log2 e."""
    lanes = tl.arange(0, TILE)
    cols = tl.arange(0, LATENT)
    rotated_cols = tl.arange(0, ROTATED)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    sums = tl.zeros([HEADS, TILE], tl.float32)
    values = tl.zeros([HEADS, LATENT], tl.float32)
    for start in tl.range(first, stop, TILE, num_stages=STAGES):
        tokens = start + lanes
        is_token = tokens < stop  # what lies past the end may never have been written
        rows = _tile_rows(indices, start, stop, block_stride, TOKEN_STRIDE, BLOCK_SIZE, TILE)
        latent = tl.load(latents + rows[:, None] + cols[None, :], mask=is_token[:, None], other=0.0)
        rotated_part = tl.load(rotated + rows[:, None] + rotated_cols[None, :], mask=is_token[:, None], other=0.0)
        scores = tl.dot(query, latent.T, input_precision="ieee")
        scores = tl.dot(rotated_query, rotated_part.T, scores, input_precision="ieee")
        scores = tl.where(is_token[None, :], scores * factor, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        sums = sums * shrink[:, None] + weights
        values = values * shrink[:, None]
        values = tl.dot(weights.to(latent.dtype), latent, values, input_precision="ieee")
        best = new_best
    total = tl.sum(sums, axis=1)
    return values / total[:, None], best + tl.log2(total)


@triton.jit
def _heads_of(source, row, heads, row_stride, head_stride, WIDTH: tl.constexpr):
    """[heads, WIDTH] of a request's query."""
    lines = source + tl.cast(row, tl.int64) * row_stride + heads * head_stride
    return tl.load(lines[:, None] + tl.arange(0, WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_rows", "most_pieces"])
def attend_pieces(
    query,
    rotated_query,
    latents,
    rotated,
    indptr,
    indices,
    lens,
    out,
    partial,
    partial_log,
    factor,
    num_rows,
    most_pieces,
    num_heads,
    query_row_stride,
    query_head_stride,
    rotated_row_stride,
    rotated_head_stride,
    block_stride,
    out_row_stride,
    out_head_stride,
    TOKEN_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (blocks of HEADS heads, G). query [R, H, L], rotated_query [R, H, P], latents and rotated [blocks,
    BLOCK_SIZE, L and P], each with consecutive components; int32 indptr [R + 1], indices, lens [R] → out [R, H, L]
    where one piece has all of a context, else fp32 partial [2 G, H, L] and partial_log [2 G, H]."""
    piece = tl.program_id(1)
    lanes = tl.arange(0, ROWS)
    ends = tl.load(indptr + 1 + lanes, mask=lanes < num_rows, other=2147483647)
    num_blocks = tl.load(indptr + num_rows)
    each = _pieces_each(indptr, num_rows, num_blocks, most_pieces, ROWS)
    num_pieces = tl.where(each > 0, most_pieces, _num_pieces(num_blocks, most_pieces, BLOCK_SIZE, TILE))
    if piece < num_pieces:
        if each > 0:
            begin, end = _cut_of_row(piece, each, indptr)
        else:
            begin, end = _cut(piece, num_blocks, num_pieces), _cut(piece + 1, num_blocks, num_pieces)
        heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        is_head = heads < num_heads
        near_heads = tl.minimum(heads, num_heads - 1)
        cols = tl.arange(0, LATENT)[None, :]
        for row in range(tl.sum((ends <= begin).to(tl.int32)), tl.sum((ends < end).to(tl.int32)) + 1):
            row_begin, row_end = tl.load(indptr + row), tl.load(indptr + row + 1)
            first, last = tl.maximum(begin, row_begin), tl.minimum(end, row_end)
            values, log = _attend(
                _heads_of(query, row, near_heads, query_row_stride, query_head_stride, LATENT),
                _heads_of(rotated_query, row, near_heads, rotated_row_stride, rotated_head_stride, ROTATED),
                latents,
                rotated,
                indices + row_begin,
                (first - row_begin) * BLOCK_SIZE,
                tl.minimum((last - row_begin) * BLOCK_SIZE, tl.load(lens + row)),
                factor,
                block_stride,
                TOKEN_STRIDE,
                HEADS,
                LATENT,
                ROTATED,
                BLOCK_SIZE,
                TILE,
                STAGES,
            )
            if last - first == row_end - row_begin:
                lines = out + tl.cast(row, tl.int64) * out_row_stride + heads[:, None] * out_head_stride
                tl.store(lines + cols, values.to(out.dtype.element_ty), mask=is_head[:, None])
            else:
                number = (2 * piece + (first > begin).to(tl.int32)).to(tl.int64) * num_heads
                tl.store(partial + (number + heads[:, None]) * LATENT + cols, values, mask=is_head[:, None])
                tl.store(partial_log + number + heads, log, mask=is_head)


@triton.jit(do_not_specialize=["num_rows", "most_pieces"])
def merge_parts(
    partial,
    partial_log,
    indptr,
    out,
    num_rows,
    most_pieces,
    num_heads,
    out_row_stride,
    out_head_stride,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (R, blocks of HEADS heads): `attend_pieces`' parts of contexts that several pieces have → out [R, H, L].
    Reads PARTS at once. Where there is nothing to merge a program should end soon: there are many."""
    row = tl.program_id(0)
    num_blocks = tl.load(indptr + num_rows)
    row_begin, row_end = tl.load(indptr + row), tl.load(indptr + row + 1)
    each = _pieces_each(indptr, num_rows, num_blocks, most_pieces, ROWS)
    num_pieces = _num_pieces(num_blocks, most_pieces, BLOCK_SIZE, TILE)
    if each > 0:
        first, last = row * each, row * each + each - 1
    else:
        first, last = _piece_of(row_begin, num_blocks, num_pieces), _piece_of(row_end - 1, num_blocks, num_pieces)
    if first < last:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        is_head = heads < num_heads
        cols = tl.arange(0, LATENT)
        best = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        values = tl.zeros([HEADS, LATENT], tl.float32)
        for start in range(first, last + 1, PARTS):
            pieces = start + tl.arange(0, PARTS)
            # A piece that begins before the request has its part in second place.
            is_second = (each == 0) & (_cut(pieces, num_blocks, num_pieces) < row_begin)
            numbers = (2 * pieces + is_second.to(tl.int32)).to(tl.int64) * num_heads
            lines = numbers[:, None] + heads[None, :]
            is_part = (pieces <= last)[:, None] & is_head[None, :]
            log = tl.load(partial_log + lines, mask=is_part, other=float("-inf"))
            offsets = lines[:, :, None] * LATENT + cols[None, None, :]
            parts = tl.load(partial + offsets, mask=is_part[:, :, None], other=0.0)
            # A head past the last has no part: 0 keeps NaN, -inf less -inf, out of its unused values.
            new_best = tl.where(is_head, tl.maximum(best, tl.max(log, axis=0)), 0.0)
            shrink = tl.exp2(best - new_best)
            weights = tl.exp2(log - new_best[None, :])
            total = total * shrink + tl.sum(weights, axis=0)
            values = values * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
            best = new_best
        lines = out + row.to(tl.int64) * out_row_stride + heads * out_head_stride
        result = (values / tl.where(is_head, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(lines[:, None] + cols[None, :], result, mask=is_head[:, None])
