"""Triton: what stands between the projections and attention, norms and rotation. Knows no caches and no models.

Everything is fp32 inside and rounded once, where it is stored. A program has some heads of one row. A head may be
rotated where it lies.

Legend: T rows, H query heads, G key heads, C head width, N unrotated and P rotated width of a head, L latent width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches
from hocket.layers.kernels import Places
from hocket.layers.rotary import Rotation

MAX_HEADS = 16
"""Heads of a program."""


@triton.jit
def _load_pairs(source, half, is_row, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """The two components of each pair, fp32 [ROWS, HALF]: of P = 2 · half from `source` [ROWS, 1] on, which lie beside
    each other, or one in each half."""
    if INTERLEAVED:  # read as they lie: by pairs it would be two bytes at a time
        col = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(source + col, mask=is_row & (col < 2 * half), other=0.0)
        a, b = tl.split(tl.reshape(both, [ROWS, HALF, 2]))
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = is_row & (pair < half)
        a = tl.load(source + pair, mask=inside, other=0.0)
        b = tl.load(source + pair + half, mask=inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(target, a, b, half, is_row, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """What `_load_pairs` reads."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)[None, :]
        tl.store(target + col, tl.reshape(tl.join(a, b), [ROWS, 2 * HALF]), mask=is_row & (col < 2 * half))
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = is_row & (pair < half)
        tl.store(target + pair, a, mask=inside)
        tl.store(target + pair + half, b, mask=inside)


@triton.jit
def _angles(angles, row, half, HALF: tl.constexpr):
    """cos and sin [1, HALF] of a row's pairs."""
    pair = tl.arange(0, HALF)[None, :]
    cos = angles + row * 2 * half + pair
    return tl.load(cos, mask=pair < half, other=0.0), tl.load(cos + half, mask=pair < half, other=0.0)


@triton.jit
def _rotated(source, half, cos, sin, is_row, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    a, b = _load_pairs(source, half, is_row, ROWS, INTERLEAVED, HALF)
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def _copy(source, target, width, is_row, WIDTH: tl.constexpr):
    col = tl.arange(0, WIDTH)[None, :]
    inside = is_row & (col < width)
    tl.store(target + col, tl.load(source + col, mask=inside), mask=inside)


@triton.jit
def _normalised(source, col, weight, width, eps):
    """RMS norm of one vector."""
    value = tl.load(source + col, mask=col < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    gain = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    return value * scale * gain


@triton.jit
def _store_latent(target, normed, a, b, col, width, half, is_stored, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    tl.store(target + col, normed, mask=is_stored & (col < width))
    _store_pairs(target + width + tl.arange(0, 1)[:, None], a, b, half, is_stored, 1, INTERLEAVED, HALF)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _latent_rows_kernel(
    q,
    query,
    compressed,
    k_rot,
    weight,
    angles,
    latent,
    places,
    slots,
    num_slots,
    q_stride,
    compressed_stride,
    k_rot_stride,
    place_stride,
    num_heads,
    plain,
    half,
    width,
    eps,
    INTERLEAVED: tl.constexpr,
    COPY: tl.constexpr,
    STORES: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = _angles(angles, row, half, HALF)
    if part * HEADS < num_heads:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = head < num_heads
        head_width = plain + 2 * half
        source = q + row * q_stride + head * head_width
        target = query + row * num_heads * head_width + head * head_width
        if COPY:
            _copy(source, target, plain, is_head, PLAIN)
        a, b = _rotated(source + plain, half, cos, sin, is_head, HEADS, INTERLEAVED, HALF)
        tl.debug_barrier()  # where a head is rotated where it lies, all of it has been read now
        _store_pairs(target + plain, a, b, half, is_head, HEADS, INTERLEAVED, HALF)
    else:
        if STORES:  # asked for early: it is here when the row is computed
            slot = tl.load(slots + row, mask=row < num_slots, other=-1)
        col = tl.arange(0, WIDTH)
        normed = _normalised(compressed + row * compressed_stride, col, weight, width, eps)
        key = k_rot + row * k_rot_stride + tl.arange(0, 1)[:, None]
        k_a, k_b = _rotated(key, half, cos, sin, True, 1, INTERLEAVED, HALF)
        own = latent + row * (width + 2 * half)
        _store_latent(own, normed, k_a, k_b, col, width, half, True, INTERLEAVED, HALF)
        if STORES:
            place = places + slot * place_stride
            _store_latent(place, normed, k_a, k_b, col, width, half, slot >= 0, INTERLEAVED, HALF)


@triton.jit
def _normed(
    source,
    target,
    weight,
    row,
    angles,
    first_head,
    num_heads,
    half,
    eps,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Heads of one row, all of whose components are in pairs: from `source` into `target`."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    cos, sin = _angles(angles, row, half, HALF)
    is_head, start = head < num_heads, head * 2 * half
    a, b = _load_pairs(source + start, half, is_head, HEADS, INTERLEAVED, HALF)
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)[:, None]
    first, second = _load_pairs(weight + tl.arange(0, 1)[:, None], half, True, 1, INTERLEAVED, HALF)
    a *= scale * first
    b *= scale * second
    _store_pairs(target + start, a * cos - b * sin, a * sin + b * cos, half, is_head, HEADS, INTERLEAVED, HALF)


@triton.jit
def _normed_heads_kernel(
    query,
    key,
    q_out,
    k_out,
    q_weight,
    k_weight,
    angles,
    query_stride,
    key_stride,
    num_heads,
    num_key_heads,
    half,
    eps,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part, num_parts = tl.program_id(1), tl.cdiv(num_heads, HEADS)
    if part < num_parts:
        own = query + row * query_stride
        out = q_out + row * num_heads * 2 * half
        _normed(own, out, q_weight, row, angles, part * HEADS, num_heads, half, eps, INTERLEAVED, HEADS, HALF)
    else:
        own = key + row * key_stride
        out = k_out + row * num_key_heads * 2 * half
        first = (part - num_parts) * HEADS
        _normed(own, out, k_weight, row, angles, first, num_key_heads, half, eps, INTERLEAVED, HEADS, HALF)


def latent_rows(
    q: Tensor,
    compressed: Tensor,
    k_rot: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation,
    places: Places | None = None,
) -> tuple[Tensor, Tensor]:
    """As `Kernels.latent_rows`; a contiguous q is rotated where it lies, another is copied on the way. What is stored
    at `places` has the bits of the latents returned."""
    num_rows, num_heads, head_width = q.shape
    width, rotated = compressed.shape[1], k_rot.shape[1]
    strides = q.stride(), compressed.stride(), k_rot.stride()
    assert strides[0][1:] == (head_width, 1)
    assert strides[1][1] == strides[2][1] == 1
    query = q if q.is_contiguous() else torch.empty_like(q, memory_format=torch.contiguous_format)
    latent = q.new_empty(num_rows, width + rotated)
    widths = head_width - rotated, rotated // 2, width
    rows, slots, num_slots, place_stride = None, None, 0, 0
    if places is not None:
        rows, slots, num_slots = places.rows, places.slots, len(places.slots)
        place_stride, step = rows.stride()
        assert (rows.dtype, rows.shape[1], step) == (latent.dtype, latent.shape[1], 1)
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        assert num_slots <= num_rows
    rows_apart = strides[0][0], strides[1][0], strides[2][0], place_stride
    how = rotation.is_interleaved, query is not q, places is not None
    launch = _latent_rows_launch(num_rows, num_heads, widths, rows_apart, eps, *how)
    launch(q, query, compressed, k_rot, weight, rotation.angles, latent, rows, slots, changing=(num_slots,))
    return query, latent


@launches
def _latent_rows_launch(
    num_rows: int,
    num_heads: int,
    widths: tuple[int, int, int],
    strides: tuple[int, int, int, int],
    eps: float,
    is_interleaved: bool,
    copies: bool,
    stores: bool,
) -> Launch:
    """widths: N, P / 2, L; strides: of rows of q, the latents, the rotated keys and the places."""
    heads = _heads_of_program(num_heads)
    plain, half, width = (int(triton.next_power_of_2(n)) for n in widths)
    return Launch(
        _latent_rows_kernel,
        (num_rows, triton.cdiv(num_heads, heads) + 1),
        *strides,
        num_heads,
        *widths,
        eps,
        INTERLEAVED=is_interleaved,
        COPY=copies,
        STORES=stores,
        HEADS=heads,
        PLAIN=plain,
        HALF=half,
        WIDTH=width,
    )


def normed_heads(
    query: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """As `Kernels.normed_heads`; rows may lie apart, the results are contiguous."""
    (num_rows, num_heads, width), num_key_heads = query.shape, key.shape[1]
    query_stride, key_stride = query.stride(), key.stride()
    assert query_stride[1:] == key_stride[1:] == (width, 1)
    q_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(key, memory_format=torch.contiguous_format)
    rows_apart = query_stride[0], key_stride[0]
    launch = _normed_heads_launch(
        num_rows, num_heads, num_key_heads, width // 2, rows_apart, eps, rotation.is_interleaved
    )
    launch(query, key, q_out, k_out, q_weight, k_weight, rotation.angles)
    return q_out, k_out


@launches
def _normed_heads_launch(
    num_rows: int,
    num_heads: int,
    num_key_heads: int,
    half: int,
    strides: tuple[int, int],
    eps: float,
    is_interleaved: bool,
) -> Launch:
    """half: C / 2; strides: of rows of queries and of keys."""
    heads = _heads_of_program(max(num_heads, num_key_heads))
    return Launch(
        _normed_heads_kernel,
        (num_rows, triton.cdiv(num_heads, heads) + triton.cdiv(num_key_heads, heads)),
        *strides,
        num_heads,
        num_key_heads,
        half,
        eps,
        INTERLEAVED=is_interleaved,
        HEADS=heads,
        HALF=int(triton.next_power_of_2(half)),
    )


def _heads_of_program(num_heads: int) -> int:
    return min(int(triton.next_power_of_2(num_heads)), MAX_HEADS)
