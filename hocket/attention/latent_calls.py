"""One planned call of FlashInfer's latent kernels, with what surrounds it. Knows no plans' making and no requests.

Legend: T rows, R rows of a call, H heads, N unrotated and P rotated width of a head, V value width, L latent width, S
tokens of contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.attention.mla import absorbed
from hocket.attention.plan import Rows


def at(x: Tensor, rows: Rows) -> Tensor:
    """These rows of x [T, …]; x itself where they are all of its rows: one operation less for each layer."""
    if isinstance(rows, slice):
        return x if rows.start == 0 and rows.stop == len(x) else x[rows]
    return x.index_select(0, rows)


@contextmanager
def written_at(out: Tensor, rows: Rows) -> Iterator[Tensor]:
    """The rows of `out` to write to: themselves if consecutive, else others that are copied to them afterwards."""
    if isinstance(rows, slice):
        yield at(out, rows)
    else:
        part = out.new_empty(len(rows), *out.shape[1:])
        yield part
        out.index_copy_(0, rows, part)


def attend_absorbed(query: Tensor, kv_b: Tensor, cache: Tensor, wrapper: Any, out: Tensor) -> None:
    """query [R, H, N + P] over the latents in the cache → out [R, H, V]. No tensor is copied: kernels take strides."""
    latent_width = kv_b.shape[2]
    plain = query.shape[2] - (cache.shape[2] - latent_width)
    into, out_of = absorbed(kv_b, plain)
    in_latent = torch.bmm(query[..., :plain].transpose(0, 1), into)  # [H, R, L]
    attended = torch.empty_like(in_latent)
    wrapper.run(
        in_latent.transpose(0, 1),
        query[..., plain:],
        cache[..., :latent_width],
        cache[..., latent_width:],
        out=attended.transpose(0, 1),
    )
    torch.bmm(attended, out_of, out=out.transpose(0, 1))


def attend_expanded(query: Tensor, context: Tensor, kv_b: Tensor, wrapper: Any, out: Tensor) -> None:
    """query [R, H, N + P] over keys and values made of latents [S, L + P] → out [R, H, V]."""
    num_heads, width, latent_width = kv_b.shape
    plain = query.shape[2] - (context.shape[1] - latent_width)
    expanded = F.linear(context[:, :latent_width], kv_b.flatten(0, 1)).view(context.shape[0], num_heads, width)
    wrapper.run(query, _keys(expanded, context, plain, latent_width), expanded[..., plain:], out=out)


def _keys(expanded: Tensor, context: Tensor, plain: int, latent_width: int) -> Tensor:
    """expanded [S, H, N + V], context [S, L + P] → keys [S, H, N + P], whose last P all heads share."""
    if expanded.is_cuda:
        from hocket.attention.expanded_keys import expanded_keys

        return expanded_keys(expanded, context, plain, latent_width)
    shared = context[:, None, latent_width:].expand(-1, expanded.shape[1], -1)
    return torch.cat((expanded[..., :plain], shared), dim=-1)
