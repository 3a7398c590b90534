"""Captured absorbed latent decode with Hocket's own Triton kernels. Knows no weights; nothing is planned on the host.

What is launched depends on shapes alone. Kernels read contexts' blocks and lengths where `DecodeBuffers` keeps them,
and cut them themselves (`triton_mla_kernels.py` says how). Importing it imports triton.

Legend: R requests, H heads, L latent and P rotated width, G pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hocket.attention import triton_mla_kernels as kernels
from hocket.attention.flashinfer_library import HeadShapes

MIN_ROWS = 256
"""Kernels are compiled for so many requests and for each power of two above, not for each captured size."""
PARTS = 4
"""Parts of a context that are merged at once."""
MERGED_HEADS = 4
"""Heads of a program that merges. One each makes so many programs that it takes 10 to 20 µs to find nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """tile: tokens at once. heads: of a program. warps, stages: of the kernel that attends; stages count from the load
    of a block's number, so 5 of them have room for two tiles, 7 for three. programs_per_sm: how many an SM holds beside
    each other: two tiles of 32 tokens and 16 queries take 93 of its 227 kB."""

    tile: int = 32
    heads: int = 16
    warps: int = 4
    stages: int = 5
    programs_per_sm: int = 1


TUNING = Tuning()


def num_pieces(num_rows: int, num_slots: int) -> int:
    """G for `num_slots` programs at once, in as many waves as give every request one.

    A multiple of the requests where that leaves no more than a tenth of the slots idle: contexts of equal length are
    then cut at their ends and nowhere near them, and a program begins anew less often.
    """
    room = -(-num_rows // num_slots) * num_slots
    multiple = room // num_rows * num_rows
    return multiple if multiple >= 0.9 * room else room


class LatentDecodes:
    """For one model's heads on one device; the workspace serves all plans, since kernels follow each other."""

    def __init__(self, heads: HeadShapes, num_sms: int, device: torch.device, tuning: Tuning = TUNING) -> None:
        assert heads.mla is not None
        self.num_heads, self.tuning = heads.num_heads, tuning
        self.factor = heads.scale * math.log2(math.e)
        self.num_head_blocks = -(-heads.num_heads // tuning.heads)
        self._latent_width = heads.mla.kv_lora_rank
        self._num_slots = max(1, num_sms * tuning.programs_per_sm // self.num_head_blocks)
        self._device = device
        self._workspaces = [torch.empty(0, dtype=torch.float32, device=device)]

    def make(self, buffers: Mapping[str, Tensor], block_size: int) -> TritonLatents:
        """What decodes `lens` int32 [R] tokens in blocks named by indptr [R + 1] and indices, all in `buffers`."""
        most_pieces = num_pieces(len(buffers["lens"]), self._num_slots)
        num_lines = 2 * most_pieces * self.num_heads
        num_floats = num_lines * (self._latent_width + 1)
        if len(self._workspaces[-1]) < num_floats:  # the smaller ones are still used by their plans
            self._workspaces.append(torch.empty(num_floats, dtype=torch.float32, device=self._device))
        workspace = self._workspaces[-1]
        partial = workspace[: num_floats - num_lines], workspace[num_floats - num_lines : num_floats]
        return TritonLatents(self, buffers, block_size, most_pieces, partial)


class TritonLatents:
    """Stands in for FlashInfer's captured wrapper of one number of requests.

    most_pieces: G. partial: fp32 [2 G · H · L] and [2 G · H], parts of contexts and their logarithms.
    """

    def __init__(
        self,
        shared: LatentDecodes,
        buffers: Mapping[str, Tensor],
        block_size: int,
        most_pieces: int,
        partial: tuple[Tensor, Tensor],
    ) -> None:
        self._shared, self._buffers, self._block_size = shared, buffers, block_size
        self._most_pieces = most_pieces
        self._partial, self._partial_log = partial

    def run(self, query: Tensor, rotated_query: Tensor, latents: Tensor, rotated: Tensor, *, out: Tensor) -> None:
        """query [R, H, L], rotated_query [R, H, P], latents [blocks, block_size, L], rotated [blocks, block_size, P] →
        out [R, H, L]. L and P are powers of two; only a last dimension must be contiguous."""
        num_rows, num_heads, width = query.shape
        shared, buffers, block_size = self._shared, self._buffers, self._block_size
        tuning, rows = shared.tuning, max(MIN_ROWS, triton.next_power_of_2(num_rows))
        assert (num_rows, num_heads) == (len(buffers["lens"]), shared.num_heads)
        assert latents.shape[1] == block_size
        assert latents.stride() == rotated.stride()
        assert all(x.stride(2) == 1 for x in (query, rotated_query, latents, out))
        kernels.attend_pieces[(shared.num_head_blocks, self._most_pieces)](
            query,
            rotated_query,
            latents,
            rotated,
            buffers["indptr"],
            buffers["indices"],
            buffers["lens"],
            out,
            self._partial,
            self._partial_log,
            shared.factor,
            num_rows,
            self._most_pieces,
            num_heads,
            *query.stride()[:2],
            *rotated_query.stride()[:2],
            latents.stride(0),
            *out.stride()[:2],
            TOKEN_STRIDE=latents.stride(1),
            ROWS=rows,
            HEADS=tuning.heads,
            LATENT=width,
            ROTATED=rotated.shape[2],
            BLOCK_SIZE=block_size,
            TILE=tuning.tile,
            STAGES=tuning.stages,
            num_warps=tuning.warps,
        )
        kernels.merge_parts[(num_rows, -(-num_heads // MERGED_HEADS))](
            self._partial,
            self._partial_log,
            buffers["indptr"],
            out,
            num_rows,
            self._most_pieces,
            num_heads,
            *out.stride()[:2],
            ROWS=rows,
            LATENT=width,
            BLOCK_SIZE=block_size,
            TILE=tuning.tile,
            PARTS=PARTS,
            HEADS=MERGED_HEADS,
            num_warps=4,
        )
