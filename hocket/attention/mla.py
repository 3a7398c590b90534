"""Paged multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1). Knows nothing of projections or rotary.

The cache holds one latent row per token: a normalised latent c and a rotated key part shared by all heads. Prefill
rows expand c into per-head keys and values. Decode rows instead move the query into the latent space (q · W_UK) and
the result back out of it (· W_UV), so that all heads attend over the latents themselves: equal by associativity.

Legend: T rows, H heads, R decode rows, S context length, N unrotated and P rotated width of a head, V value width,
L latent width (of c).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.attention.plan import AttentionPlan, DecodePlan, PrefillTile
from hocket.attention.sdpa import causal_attention, gather_rows
from hocket.cache.storage import write_latent
from hocket.trace import spans
from hocket.trace.spans import Stage


def paged_mla(query: Tensor, latent: Tensor, kv_b: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Store this step's latents, then attend.

    query [T, H, N + P], its last P rotated; latent [T, L + P]; kv_b [H, N + V, L], the expansion of the latent;
    cache [blocks, block_size, L + P]. Returns [T, H · V], padding rows zero.
    """
    spans.begin(Stage.ATTENTION)
    if plan.write_slots is not None:
        write_latent(cache, plan.written(latent), plan.write_slots)
    if len(plan.decodes) == 1 and plan.decodes[0].num_rows == plan.num_rows:
        return _decode(query, kv_b, cache, plan.decodes[0], scale)  # all rows are decodes, in order
    rotated = latent.shape[1] - kv_b.shape[2]
    value_width = kv_b.shape[1] - (query.shape[2] - rotated)
    out = query.new_zeros(plan.num_rows, query.shape[1] * value_width)
    for group in plan.decodes:
        out[group.rows] = _decode(query[group.rows], kv_b, cache, group, scale)
    for tile in plan.prefills:
        out[tile.start : tile.stop] = _prefill(query, latent, kv_b, cache, tile, scale)
    return out


def absorbed(kv_b: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """kv_b [H, N + V, L], N = `plain` → matrices per head into the latent space [H, N, L] and out of it [H, L, V]."""
    return kv_b[:, :plain], kv_b[:, plain:].transpose(1, 2)


def _decode(query: Tensor, kv_b: Tensor, cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """Absorbed: query [R, H, N + P] → [R, H · V]."""
    num_rows = query.shape[0]
    latent_width = kv_b.shape[2]
    plain = query.shape[2] - (cache.shape[2] - latent_width)
    into, out_of = absorbed(kv_b, plain)
    in_latent = torch.bmm(query[..., :plain].transpose(0, 1), into).transpose(0, 1)
    q = torch.cat((in_latent, query[..., plain:]), dim=-1)[:, None]
    context = gather_rows(cache.flatten(0, 1), plan.slots).view(num_rows, 1, -1, cache.shape[2])
    # Values are the latents. The rotated part rides along and is dropped: equal widths take the fused kernel.
    out = F.scaled_dot_product_attention(q, context, context, attn_mask=plan.mask, scale=scale)
    values = torch.bmm(out[:, 0, :, :latent_width].transpose(0, 1), out_of)
    return values.transpose(0, 1).flatten(1)


def _prefill(query: Tensor, latent: Tensor, kv_b: Tensor, cache: Tensor, tile: PrefillTile, scale: float) -> Tensor:
    """Un-absorbed: one tile of one request, [rows, H · V]."""
    query = query[tile.start : tile.stop]
    own = latent[tile.start : tile.stop]
    context = own if tile.slots is None else gather_rows(cache.flatten(0, 1), tile.slots)
    num_heads, width, latent_width = kv_b.shape
    plain = query.shape[2] - (context.shape[1] - latent_width)
    expanded = F.linear(context[:, :latent_width], kv_b.flatten(0, 1)).view(-1, num_heads, width)
    shared = context[:, None, latent_width:].expand(-1, num_heads, -1)
    key = torch.cat((expanded[..., :plain], shared), dim=-1)
    value = expanded[..., plain:]
    value_width, missing = value.shape[2], key.shape[2] - value.shape[2]
    if missing <= 0:
        return causal_attention(query, key, value, tile.mask(query.device), scale)
    # Zero-pad values to the keys' width: equal widths take the fused kernel.
    out = causal_attention(query, key, F.pad(value, (0, missing)), tile.mask(query.device), scale)
    return out.view(-1, num_heads, key.shape[2])[..., :value_width].flatten(1)
