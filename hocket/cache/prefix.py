"""Names the content of full KV blocks by a chain of hashes. Knows no block ids, requests or tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

ROOT_HASH = b"hocket-kv-root"
"""The parent of a sequence's first block."""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The 32-byte name of a full block: it stands for these tokens *and* all tokens before them.

    parent: hash of the block before, or ROOT_HASH. Stable across processes and machines (unlike `hash()`), so that
    ranks may compare names; wide enough that two prefixes never share one, not even by intent.
    """
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return blake2b(parent + packed, digest_size=32).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Appends to `hashes` until it names the first `num_blocks` full blocks of `token_ids`; keeps what is there."""
    parent = hashes[-1] if hashes else ROOT_HASH
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
