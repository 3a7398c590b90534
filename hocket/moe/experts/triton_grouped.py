"""Experts as two persistent Triton GEMMs over tiles of rows sorted by expert. NVIDIA GPUs; the host waits for nothing.

Shapes: N rows, D hidden, I intermediate, E local experts, K top-k, P places.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hocket.launch import Launch, launches
from hocket.moe.experts import groups, permute
from hocket.moe.experts.base import Experts
from hocket.moe.experts.tile_config import GemmConfig, TileConfig, tile_config
from hocket.moe.grouped import GroupedRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TMA_BYTES = 16
"""The copy unit takes rows that are multiples of so many bytes apart."""


class TritonGroupedExperts(Experts):
    """Good at few rows per expert, where reading the weights is all the time there is.

    A row's slots are summed in their order.
    """

    name = "triton_grouped"
    captures = True

    @classmethod
    def unsupported_reason(cls, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> str | None:
        return None if dtype in DTYPES else f"triton_grouped does not take {dtype}"

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.check_ids(ids)
        if ids.numel() == 0 or self.num_local_experts == 0:
            return x.new_zeros(x.shape)
        config = tile_config(self.rows_per_expert(ids), x.element_size())
        return grouped_mlp(x, ids, weights, self.w13, self.w2, config, self.num_sms, self.local_id_of)

    def forward_grouped(self, rows: GroupedRows) -> Tensor:
        if self.num_local_experts == 0 or rows.max_rows == 0:
            return rows.x.new_empty(rows.x.shape)
        config = tile_config(rows.expected_rows, rows.x.element_size())
        return grouped_rows_mlp(rows, self.w13, self.w2, config, self.num_sms)


def grouped_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    config: TileConfig,
    num_sms: int | None = None,
    local_id_of: Tensor | None = None,
) -> Tensor:
    """`Experts.forward` for weights w13 [E, 2 I, D] and w2 [E, D, I] with the given block sizes; N and E at least 1."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = permute.tiles_of(ids, len(w2), config.block_m, local_id_of)
    return permute.gather_sum(_products(x, ids.shape[1], tiles, w13, w2, config, num_sms), tiles, weights)


def grouped_rows_mlp(rows: GroupedRows, w13: Tensor, w2: Tensor, config: TileConfig, num_sms: int | None) -> Tensor:
    """`Experts.forward_grouped` with the given block sizes; N and E at least 1."""
    shape = rows.x.shape
    x = rows.x.view(-1, shape[-1])
    tiles = groups.tiles_of_groups(rows, config.block_m)
    out = _products(x, 1, tiles, w13, w2, config, num_sms)
    back = permute.Places(len(x), tiles.slot_of_place, rows.counts)
    return permute.scatter_rows(out, back, 1).view(shape)


def _products(
    x: Tensor, top_k: int, tiles: permute.Tiles, w13: Tensor, w2: Tensor, config: TileConfig, num_sms: int | None
) -> Tensor:
    """x [N, D] → [P, D], the row of each place's slot through its expert."""
    _, hidden_size, inter = w2.shape
    sms = num_sms or _num_sms(x.device)
    tma = _uses_tma(w13, config.gate_up), _uses_tma(w2, config.down)
    gate_up, down = _launches(config, tiles.max_tiles, sms, hidden_size, inter, x.stride(0), top_k, tma)
    hidden = x.new_empty(tiles.num_places, inter)
    of_tiles = tiles.expert_of_tile, tiles.rows_of_tile, tiles.num_tiles
    if tma[0]:
        gate_up.by_triton(x, _descriptor(w13, config.gate_up), hidden, tiles.slot_of_place, *of_tiles)
    else:
        gate_up(x, w13, hidden, tiles.slot_of_place, *of_tiles)
    out = x.new_empty(tiles.num_places, hidden_size)
    if tma[1]:
        down.by_triton(hidden, _descriptor(w2, config.down), out, *of_tiles)
    else:
        down(hidden, w2, out, *of_tiles)
    return out


@launches
def _launches(
    config: TileConfig,
    max_tiles: int,
    num_sms: int,
    hidden_size: int,
    inter: int,
    stride: int,
    top_k: int,
    tma: tuple[bool, bool],
) -> tuple[Launch, Launch]:
    """gate_up and down. stride: of x's rows; tma: whether the weights of each are read by the copy unit."""
    from hocket.moe.experts.kernels import grouped_gemm as kernels

    gate_up = Launch(
        kernels.gate_up,
        _grid(config.gate_up, max_tiles, inter, num_sms),
        stride,
        TOP_K=top_k,
        D=hidden_size,
        INTER=inter,
        ALIGN=permute.row_alignment(stride),
        **_blocks(config.block_m, config.gate_up, tma[0]),
    )
    down = Launch(
        kernels.down,
        _grid(config.down, max_tiles, hidden_size, num_sms),
        D=hidden_size,
        INTER=inter,
        **_blocks(config.block_m, config.down, tma[1]),
    )
    return gate_up, down


def _grid(config: GemmConfig, max_tiles: int, columns: int, num_sms: int) -> tuple[int]:
    """Programs: no more than there can be blocks."""
    return (min(num_sms * config.programs_per_sm, max_tiles * -(-columns // config.block_n)),)


def _uses_tma(weights: Tensor, config: GemmConfig) -> bool:
    return config.use_tma and weights.stride(1) * weights.element_size() % _TMA_BYTES == 0


def _descriptor(weights: Tensor, config: GemmConfig) -> Any:
    """[E, rows, columns] as the copy unit takes it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weights.flatten(0, 1), [config.block_n, config.block_k])


def _blocks(block_m: int, config: GemmConfig, use_tma: bool) -> dict[str, int]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "STAGES": config.num_stages,
        "USE_TMA": use_tma,
        "num_warps": config.num_warps,
    }


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
