"""A Triton kernel that makes keys of heads from expanded latents and the rotated part that all heads share. Knows
nothing of attention.

Legend: S tokens, H heads, N unrotated and P rotated width of a head, V value width, L latent width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hocket.launch import Launch, launches

MAX_HEADS = 16
"""Of one program."""


def expanded_keys(expanded: Tensor, context: Tensor, plain: int, latent_width: int) -> Tensor:
    """expanded [S, H, N + V], context [S, L + P], N = `plain`, L = `latent_width` → contiguous [S, H, N + P]: the first
    N of each head, then the last P of the token."""
    num_tokens, num_heads, _ = expanded.shape
    rotated = context.shape[1] - latent_width
    strides = *expanded.stride(), *context.stride()
    assert strides[2] == strides[4] == 1
    key = expanded.new_empty(num_tokens, num_heads, plain + rotated)
    if num_tokens:
        widths = plain, rotated, latent_width
        _launch(num_tokens, num_heads, widths, (strides[0], strides[1], strides[3]))(expanded, context, key)
    return key


@launches
def _launch(num_tokens: int, num_heads: int, widths: tuple[int, int, int], strides: tuple[int, int, int]) -> Launch:
    """widths: N, P, L; strides: of tokens and heads of what was expanded, and of tokens of the context."""
    heads = min(int(triton.next_power_of_2(num_heads)), MAX_HEADS)
    plain, rotated, latent = widths
    return Launch(
        _expanded_keys,
        (num_tokens, triton.cdiv(num_heads, heads)),
        *strides,
        num_heads,
        N=plain,
        P=rotated,
        LATENT=latent,
        HEADS=heads,
        PLAIN=int(triton.next_power_of_2(plain)),
        ROTATED=int(triton.next_power_of_2(rotated)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _expanded_keys(  # type: ignore[no-untyped-def]
    expanded,
    context,
    key,
    token_stride,
    head_stride,
    context_stride,
    num_heads,
    N: tl.constexpr,
    P: tl.constexpr,
    LATENT: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTATED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_head = head < num_heads
    out = key + (token * num_heads + head) * (N + P)
    column = tl.arange(0, PLAIN)[None, :]
    inside = is_head & (column < N)
    tl.store(
        out + column, tl.load(expanded + token * token_stride + head * head_stride + column, mask=inside), mask=inside
    )
    column = tl.arange(0, ROTATED)
    shared = tl.load(context + token * context_stride + LATENT + column, mask=column < P)[None, :]
    column = column[None, :]
    tl.store(out + N + column, tl.broadcast_to(shared, HEADS, ROTATED), mask=is_head & (column < P))
