"""The KV cache's tensors: their shapes, their size, writing rows. Knows nothing of blocks' owners or of attention.

Legend: T tokens, B blocks, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.config.model import ModelConfig


def _row_shape(config: ModelConfig) -> tuple[int, ...]:
    """Shape of what one layer keeps of one token: key and value heads, or the shared latent."""
    if config.mla is not None:
        return (config.mla.latent_dim,)
    return (2, config.num_kv_heads, config.head_dim)


def bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block of `block_size` tokens, all layers together."""
    elements = 1
    for width in _row_shape(config):
        elements *= width
    return config.num_layers * block_size * elements * dtype.itemsize


def allocate_kv_caches(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One zeroed tensor per layer: [2, B, block_size, H, head_dim] (keys, values); MLA: [B, block_size, latent]."""
    if config.mla is not None:
        shape: tuple[int, ...] = (num_blocks, block_size, config.mla.latent_dim)
    else:
        shape = (2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]


def block_size_of(cache: Tensor) -> int:
    """Tokens a block of a layer's cache holds."""
    return cache.shape[2] if cache.dim() == 5 else cache.shape[1]


def num_blocks_of(cache: Tensor) -> int:
    """Blocks of a layer's cache."""
    return cache.shape[1] if cache.dim() == 5 else cache.shape[0]


def block_of(cache: Tensor, block: int) -> Tensor:
    """A view of one block of a layer's cache."""
    return cache[:, block] if cache.dim() == 5 else cache[block]


def slot_bytes_of(cache: Tensor) -> int:
    """Bytes that a layer's cache holds of one token."""
    return cache.nbytes // (num_blocks_of(cache) * block_size_of(cache))


def write_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Store key and value [T, H, head_dim] at `slots` int64 [T] (distinct, none negative)."""
    keys, values = cache.flatten(1, 2).unbind(0)
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)


def write_latent(cache: Tensor, latent: Tensor, slots: Tensor) -> None:
    """Store latent rows [T, latent] at `slots` int64 [T] (distinct, none negative)."""
    cache.flatten(0, 1).index_copy_(0, slots, latent)
