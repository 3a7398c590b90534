"""Rotary position embedding with YaRN and linear scaling. Knows nothing of attention or of head counts.

Sources: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071 (§3.2 "NTK-by-parts", §3.4 attention scaling).
Legend: T tokens, P rotated width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.config.model import ModelConfig, RopeConfig

FIRST_TABLE_ROWS = 4096
PIECE_ROWS = 128


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1: how much YaRN sharpens attention at this extension factor (1 if factor ≤ 1)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_mscale(config: RopeConfig) -> float:
    """What a latent-attention model's softmax scale is multiplied by: mscale², if `mscale_all_dim` asks for it."""
    if config.rope_type == "default" or not config.mscale_all_dim:
        return 1.0
    return yarn_mscale(config.factor, config.mscale_all_dim) ** 2


def softmax_scale(config: ModelConfig) -> float:
    """What a model's products of queries and keys are multiplied by: 1 / √width of a head, times YaRN's sharpening."""
    if config.mla is None:
        return math.pow(config.head_dim, -0.5)
    return math.pow(config.mla.qk_head_dim, -0.5) * softmax_mscale(config.rope)


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """fp32 [P / 2] on the CPU: radians per position of each pair of components.

    YaRN keeps pairs that turn more than `beta_fast` times over the original context, divides the frequency of those
    that turn less than `beta_slow` times by `factor`, and blends linearly in between.
    """
    scale_of_pair = config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
    plain = 1.0 / scale_of_pair
    if config.rope_type == "default":
        return plain
    if config.rope_type == "linear":
        return plain / config.factor
    low, high = _pair_of_turns(config, config.beta_fast), _pair_of_turns(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    width = high - low if high != low else 0.001  # as the reference implementation does: a step, not a division by 0
    kept = 1 - ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (config.factor * scale_of_pair) * (1 - kept) + plain * kept


def _pair_of_turns(config: RopeConfig, turns: float) -> float:
    """The (fractional) index of the pair that makes `turns` turns over the original context."""
    wavelength = config.original_max_position_embeddings / (turns * 2 * math.pi)
    return config.dim * math.log(wavelength) / (2 * math.log(config.theta))


@dataclass(frozen=True, slots=True)
class Rotation:
    """One step's angles: `turn` complex [T, 1, P / 2] for pairs of neighbours, else cos and signed sin [T, 1, P].

    angles: fp32 [T, P], cos of the P / 2 angles and then sin, whatever makes a pair.
    """

    angles: Tensor
    turn: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    exact: bool = False

    @property
    def is_interleaved(self) -> bool:
        """Whether pairs are neighbours, else a component of the first half and one of the second."""
        return self.turn is not None

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, heads, P] → rotated (fp32 inside), in the same dtype and order of components."""
        wide = x.to(torch.float32)
        if self.exact:
            return self._rotate_exactly(wide).to(x.dtype)
        if self.turn is not None:
            pairs = torch.view_as_complex(wide.reshape(*wide.shape[:-1], wide.shape[-1] // 2, 2).contiguous())
            return torch.view_as_real(pairs * self.turn).flatten(-2).to(x.dtype)
        assert self.cos is not None
        assert self.sin is not None
        return torch.addcmul(wide * self.cos, wide.roll(wide.shape[-1] // 2, -1), self.sin).to(x.dtype)

    def _rotate_exactly(self, wide: Tensor) -> Tensor:
        """One rounded operation at a time: a fused one rounds differently at the end of a tensor on some CPUs."""
        if self.turn is None:
            assert self.cos is not None
            assert self.sin is not None
            return wide * self.cos + wide.roll(wide.shape[-1] // 2, -1) * self.sin
        first, second = wide[..., 0::2], wide[..., 1::2]
        cos, sin = self.turn.real, self.turn.imag
        return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


class RotaryEmbedding(nn.Module):
    """Tables of angles, grown on demand, looked up once a step for all layers.

    exact: rotate such that a row's last bits do not depend on how many rows there are; a little slower.
    """

    def __init__(self, config: RopeConfig, device: torch.device, *, exact: bool = False) -> None:
        super().__init__()
        self._exact = exact
        self.interleaved = config.interleaved
        self._factor = attention_factor(config)
        self._inv_freq = inverse_frequencies(config).to(device)
        self._table = self._build(0)

    def reserve(self, num_positions: int) -> None:
        """Make the table hold positions below `num_positions` now, so that it never moves later."""
        if num_positions > len(self._table):
            self._table = self._build(num_positions)

    def _build(self, num_positions: int) -> Tensor:
        """fp32 [at least `num_positions`, P], cos of the P / 2 angles and then sin.

        In pieces of one size, so that an entry's last bits do not depend on how long the table is.
        """
        pieces = [self._piece(first) for first in range(0, max(num_positions, 1), PIECE_ROWS)]
        return torch.cat(pieces)

    def _piece(self, first: int) -> Tensor:
        positions = torch.arange(first, first + PIECE_ROWS, dtype=torch.float32, device=self._inv_freq.device)
        angles = positions[:, None] * self._inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self._factor

    def forward(self, positions: Tensor, max_position: int) -> Rotation:
        """Angles for int64 positions [T], none of which exceeds `max_position` (below 0: all are padding's 0)."""
        if max(max_position, 0) >= len(self._table):
            self.reserve(max(FIRST_TABLE_ROWS, 1 << max_position.bit_length()))
        angles = self._table.index_select(0, positions)
        cos, sin = angles[:, None].chunk(2, dim=-1)
        if self.interleaved:
            return Rotation(angles, turn=torch.complex(cos, sin), exact=self._exact)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(angles, cos=cos, sin=sin, exact=self._exact)
