"""What an attention backend is: plans a step once, then attends in every layer. Knows no projections and no rotary.

Legend: T rows, H query heads, G key/value heads, C head width, N unrotated and P rotated width of a head, V value
width, L latent width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.attention.plan import Plan
from hocket.layers.kernels import Places

P = TypeVar("P", bound=Plan)


class AttentionBackend(ABC, Generic[P]):
    """Both kinds of attention over a paged cache."""

    name: ClassVar[str]
    captures: ClassVar[bool] = False
    """Whether `decode_plan` and `update` exist, so that decode can be captured in a CUDA graph."""

    @abstractmethod
    def plan(self, meta: AttentionMetadata, num_rows: int, block_size: int, dtype: torch.dtype, slot_bytes: int) -> P:
        """The plan for `num_rows` rows (padding included) over a cache of `block_size` tokens a block.

        dtype: of the queries. slot_bytes: what a layer's cache holds of one token.
        """

    def decode_plan(self, num_rows: int, max_seq_len: int, block_size: int, dtype: torch.dtype, slot_bytes: int) -> P:
        """A plan for `num_rows` requests of one new token and at most `max_seq_len` in all, on addresses that stay.

        Attention with it launches the same kernels whatever the requests, and touches nothing on the host. Run it once
        before it is captured: kernels are loaded then. To be filled by `update` before that, and before each replay.
        """
        raise AssertionError(f"{self.name} cannot be captured")

    def update(self, plan: P, meta: AttentionMetadata) -> None:
        """Make a `decode_plan` that of these requests: the host plans, copies to the device are queued.

        Reads only the *_cpu fields of `meta`, and slot_mapping, which may lie on the host and has a slot for every row;
        padding is requests of one token with a block of their own. The current stream must be the one of the replay.
        """
        raise AssertionError(f"{self.name} cannot be captured")

    def places(self, cache: Tensor, plan: P) -> Places | None:
        """Where the step's latents may be stored by whoever makes them, before `latent` is called with `is_stored`.

        None: nobody but the backend stores them.
        """
        return None

    @abstractmethod
    def grouped_query(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: P, scale: float) -> Tensor:
        """Store this step's keys and values, then attend.

        query [T, H, C]; key, value [T, G, C]; cache [2, blocks, block_size, G, C]. Returns [T, H · C], padding rows
        zero.
        """

    @abstractmethod
    def latent(
        self,
        query: Tensor,
        latent: Tensor,
        kv_b: Tensor,
        cache: Tensor,
        plan: P,
        scale: float,
        is_stored: bool = False,
    ) -> Tensor:
        """Store this step's latents, then attend.

        query [T, H, N + P], its last P rotated; latent [T, L + P]; kv_b [H, N + V, L], the expansion of the latent;
        cache [blocks, block_size, L + P]. is_stored: the latents lie at `places`. Returns [T, H · V], padding rows
        zero.
        """
