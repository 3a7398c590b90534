"""How layers compute what may round differently with the number of rows beside a row. Knows no layer and no model.

Matrix libraries take another kernel for few rows, and vectorised functions another for the last few elements of a
tensor, each with other last bits. `TiledKernels` never calls them that way, so that a row's result depends on that row
alone, for the price of rows that are only padding.

Shapes: T rows, K input width, N output width, H heads; of the fused operations see each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.config.moe import MoEConfig
from hocket.layers import routing
from hocket.layers.rotary import Rotation

ROWS = 16
"""Products get a multiple of so many rows. Below 4 (one thread) or 12 (two) MKL sums in another order."""
MAX_ROWS = 128
"""Most rows of one call: so there are few shapes, and all of them can be tried at start (`rows_are_alike`)."""
LANES = 64
"""Elements that no vectorised function takes at once: a multiple leaves no rest."""
MAX_ELEMENTS = 16384
"""Most elements of one call: PyTorch gives so few to one thread, so no cut between threads leaves a rest either."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows of a step are wanted besides: of x [T, N] row i at rows[slots[i]]; −1: nowhere.

    rows [R, N], which may lie apart; slots int64 [S] of the first S ≤ T rows. Of rows with the same slot one stays.
    """

    rows: Tensor
    slots: Tensor


class Kernels:
    """PyTorch's own: the fastest; a row's last bits may depend on how many rows there are."""

    name: ClassVar[str] = "torch"
    batch_invariant: ClassVar[bool] = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ (+ bias [N]) → [T, N]."""
        return F.linear(x, weight, bias)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H, K], weight [H, K, N] → [T, H, N]: each head by its own matrix."""
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def silu(self, x: Tensor) -> Tensor:
        """x · sigmoid(x), element by element."""
        return F.silu(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + e⁻ˣ), element by element."""
        return x.sigmoid()

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ → fp32 [T, N]."""
        return self.linear(x, weight).float()

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2N] → [T, N]: silu of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.silu(gate) * up

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., N] / sqrt(mean(x²) + eps) · weight [N], fp32 inside."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, residual and, if there is one, beside [T, N] → (`rms_norm` of their sum, the sum); the residual may be
        overwritten."""
        total = residual + (x if beside is None else x + beside)
        return self.rms_norm(total, weight, eps), total

    def latent_rows(
        self,
        q: Tensor,
        compressed: Tensor,
        k_rot: Tensor,
        weight: Tensor,
        eps: float,
        rotation: Rotation,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, bool]:
        """What latent attention reads of the projections, contiguous: (query [T, H, N + P], latent [T, L + P], whether
        the latents lie at `places` too: the caller stores them where not).

        q [T, H, N + P], whose last P are rotated, may be overwritten; compressed [T, L] is normalised with weight [L];
        k_rot [T, P] is rotated. places: of rows in q's dtype.
        """
        rotated = k_rot.shape[-1]
        query = torch.cat((q[..., :-rotated], rotation.rotate(q[..., -rotated:])), dim=-1)
        latent = torch.cat((self.rms_norm(compressed, weight, eps), rotation.rotate(k_rot[:, None])[:, 0]), dim=-1)
        return query, latent, False

    def normed_heads(
        self, query: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """query [T, H, C], key [T, G, C] → the same, each head normalised (weights [C]) and then rotated."""
        query, key = self.rms_norm(query, q_weight, eps), self.rms_norm(key, k_weight, eps)
        return rotation.rotate(query), rotation.rotate(key)

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: MoEConfig, is_padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Top-k routing of x [T, D] with the gate `weight` [E, D] and the correction bias fp32 [E].

        Logits are computed in the weight's dtype, all else in fp32. Returns (weights fp32 [T, K], expert ids int64
        [T, K]), best expert first; ids of rows where is_padding [T] are DROPPED.
        """
        logits = self.linear(x.to(weight.dtype), weight).float()
        scores = logits.softmax(dim=-1) if config.scoring == "softmax" else self.sigmoid(logits)
        topk_weights, topk_ids = routing.choose(scores, bias, config)
        if is_padding is not None:
            topk_ids = topk_ids.masked_fill(is_padding[:, None], routing.DROPPED)
        return topk_weights, topk_ids


class TiledKernels(Kernels):
    """Bit-equal for a row in whatever company; see the module's text."""

    name = "tiled"
    batch_invariant = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = [F.linear(part, weight, bias) for part in torch.split(_padded(x), MAX_ROWS)]
        return _joined(parts, len(x))

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.split(_padded(x), MAX_ROWS)
        parts = [torch.bmm(part.transpose(0, 1).contiguous(), weight).transpose(0, 1) for part in rows]
        return _joined(parts, len(x))

    def silu(self, x: Tensor) -> Tensor:
        return _elementwise(F.silu, x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return _elementwise(torch.sigmoid, x)


PLAIN = Kernels()


def rows_are_alike(product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether `product` of TiledKernels keeps what they promise: x [MAX_ROWS, …] (any values), rows → rows.

    Tries all numbers of rows that it ever gets, and rows at other places of a tile.
    """
    expected = torch.cat([product(tile) for tile in torch.split(x, ROWS)])
    if any(not torch.equal(product(x[:n]), expected[:n]) for n in range(ROWS, MAX_ROWS + 1, ROWS)):
        return False
    first, of_first = x[:ROWS], expected[:ROWS]
    return all(torch.equal(product(first.roll(n, 0)), of_first.roll(n, 0)) for n in (1, 4, 7))


def _padded(x: Tensor) -> Tensor:
    """x [T, …] with rows of zeros up to a multiple of ROWS, contiguous."""
    missing = -len(x) % ROWS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()


def _joined(parts: list[Tensor], num_rows: int) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]


def _elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    flat = F.pad(x.reshape(-1), (0, -x.numel() % LANES))
    return _joined([function(part) for part in torch.split(flat, MAX_ELEMENTS)], x.numel()).view(x.shape)
