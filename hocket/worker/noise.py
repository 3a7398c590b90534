"""Random numbers as a pure function of (seed, step, token id). Knows nothing of requests or logits.

A draw must not depend on which other rows share the batch, nor on whether the request was preempted and computed again,
so there is no generator whose state could differ: number `id` of the stream (seed, step) is computed directly. It is
also one vectorised expression for all rows, where one generator per row would cost a launch per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LARGEST_UNIFORM = 1 - 2.0**-24  # the largest fp32 below 1


def stream_key(seed: int, step: int) -> int:
    """State (signed 64 bits) at which the stream of draw number `step` under `seed` begins."""
    return _signed(_mix(_mix(seed + _GAMMA) + step * _GAMMA))


def exponential_noise(keys: Tensor, num_ids: int) -> Tensor:
    """Exponentially distributed numbers, mean 1: fp32 [R, num_ids], all above 0, for keys int64 [R].

    Row r is elements 1 … num_ids of the SplitMix64 stream begun at keys[r], mapped to u in (0, 1), then to -log(1 - u).
    """
    ids = torch.arange(1, num_ids + 1, dtype=torch.int64, device=keys.device)
    z = keys[:, None] + ids * _signed(_GAMMA)  # int64 arithmetic wraps, as the generator wants
    _xor_shift_(z, 30).mul_(_signed(_MIX_1))
    _xor_shift_(z, 27).mul_(_signed(_MIX_2))
    _xor_shift_(z, 31)
    z.bitwise_and_((1 << 63) - 1).bitwise_or_(1)  # 63 bits, never 0: small numbers keep their full relative precision
    uniform = z.to(torch.float32).mul_(2.0**-63).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """z ^= z >>> bits, in place; the logical shift is an arithmetic one with the copied sign bits cleared."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
