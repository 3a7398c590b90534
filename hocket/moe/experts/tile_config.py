"""Block sizes of the Triton grouped GEMMs, chosen from shapes alone. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """block_n output columns (of gate and of up: so many each), block_k at a time; programs_per_sm run beside each
    other; group: row tiles that go down one block of columns before the next one begins; use_tma: whether weights are
    read by the GPU's copy unit instead of by its threads."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    group: int = 8
    use_tma: bool = False


@dataclass(frozen=True, slots=True)
class TileConfig:
    """block_m: rows of a tile, the same for both GEMMs."""

    block_m: int
    gate_up: GemmConfig
    down: GemmConfig


_SIXTEEN_BITS = (
    (14, TileConfig(16, GemmConfig(128, 128, 8, 3, 2), GemmConfig(128, 128, 4, 3, 4))),
    (32, TileConfig(32, GemmConfig(128, 128, 8, 3, 2), GemmConfig(128, 128, 4, 3, 2))),
    (96, TileConfig(64, GemmConfig(128, 64, 4, 4, 2), GemmConfig(128, 64, 4, 3, 2))),
)
"""(most rows per expert, what is best up to there): few rows leave all to the reading of weights. Swept on an H200 at
12, 16, 24, 48, 64, 256 and 768 rows."""
_SIXTEEN_BITS_LARGE = TileConfig(128, GemmConfig(128, 64, 8, 4, 2), GemmConfig(256, 64, 8, 4, 2))
_FP32 = TileConfig(16, GemmConfig(32, 32, 4, 2, 2), GemmConfig(64, 32, 4, 2, 2))


def tile_config(rows_per_expert: float, itemsize: int) -> TileConfig:
    """For so many expected rows of each local expert, in a dtype of itemsize bytes."""
    if itemsize == 4:
        return _FP32
    for most, config in _SIXTEEN_BITS:
        if rows_per_expert <= most:
            return config
    return _SIXTEEN_BITS_LARGE
