"""Paged grouped-query attention with PyTorch's scaled_dot_product_attention. Knows nothing of projections or rotary.

Legend: T rows, H query heads, G key/value heads, C head width, R decode rows, S context length.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hocket.attention.plan import AttentionPlan, DecodePlan, PrefillTile
from hocket.cache.storage import write_kv
from hocket.trace import spans
from hocket.trace.spans import Stage


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Store this step's keys and values, then attend.

    query [T, H, C]; key, value [T, G, C]; cache [2, blocks, block_size, G, C]. Returns [T, H · C], padding rows zero.
    """
    spans.begin(Stage.ATTENTION)
    if plan.write_slots is not None:
        write_kv(cache, plan.written(key), plan.written(value), plan.write_slots)
    if len(plan.decodes) == 1 and plan.decodes[0].num_rows == plan.num_rows:
        return _decode(query, cache, plan.decodes[0], scale)  # all rows are decodes, in order
    out = query.new_zeros(plan.num_rows, query.shape[1] * query.shape[2])
    for group in plan.decodes:
        out[group.rows] = _decode(query[group.rows], cache, group, scale)
    for tile in plan.prefills:
        out[tile.start : tile.stop] = _prefill(query, key, value, cache, tile, scale)
    return out


def gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of a flat cache [slots, width] at `slots` int64 [N]: [N, width]. (index_select beats indexing on a CPU.)"""
    return cache.index_select(0, slots)


def _decode(query: Tensor, cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """query [R, H, C] against padded contexts: the query heads of a key head are its query rows. Returns [R, H · C]."""
    num_rows, num_heads, width = query.shape
    num_kv_heads = cache.shape[3]
    flat = cache.view(2, -1, num_kv_heads * width)
    contexts = (num_rows, -1, num_kv_heads, width)
    keys = gather_rows(flat[0], plan.slots).view(contexts).transpose(1, 2)
    values = gather_rows(flat[1], plan.slots).view(contexts).transpose(1, 2)
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, width)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask, scale=scale)
    return out.reshape(num_rows, num_heads * width)


def _prefill(query: Tensor, key: Tensor, value: Tensor, cache: Tensor, tile: PrefillTile, scale: float) -> Tensor:
    """One tile of one request: [rows, H · C]."""
    query = query[tile.start : tile.stop]
    num_kv_heads, width = key.shape[1:]
    if tile.slots is None:
        key, value = key[tile.start : tile.stop], value[tile.start : tile.stop]
    else:
        flat = cache.view(2, -1, num_kv_heads * width)
        key = gather_rows(flat[0], tile.slots).view(-1, num_kv_heads, width)
        value = gather_rows(flat[1], tile.slots).view(-1, num_kv_heads, width)
    return causal_attention(query, key, value, tile.mask(query.device), scale)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One request's rows [L, H, C] against keys, values [S, G, C]; mask bool [L, S], None: causal, L = S.

    Returns [L, H · width of value].
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1).flatten(1)
