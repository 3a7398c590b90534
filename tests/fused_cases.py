"""Fused kernels against the formulas in fp64, for whatever device and sizes a test has. For tests only.

A fused operation is fp32 inside and rounds once: each element may be half a unit in the last place away, and a little
for fp32's own errors. Rows of NaN stand for padding: they may do what they like, but not to other rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hocket.config.model import RopeConfig
from hocket.config.moe import MoEConfig
from hocket.layers import routing
from hocket.layers.kernels import Kernels, Places
from hocket.layers.rotary import RotaryEmbedding, Rotation

FP32_SLACK = 32 * torch.finfo(torch.float32).eps
EPS = 1e-6
MAX_POSITION = 300


def _routing(method: str, num_experts: int, top_k: int, groups: tuple[int, int], **others: Any) -> MoEConfig:
    """groups: (how many, how many of them a token may use)."""
    plain = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring": "softmax"}
    no_matter = {"intermediate_size": 16, "num_shared_experts": 0, "layers": (True,)}
    num_groups, topk_groups = groups
    chosen = {"num_experts": num_experts, "top_k": top_k, "num_groups": num_groups, "topk_groups": topk_groups}
    return MoEConfig(topk_method=method, **chosen, **{**plain, **no_matter, **others})


V2 = _routing("greedy", 64, 6, (1, 1))
V3 = _routing("noaux_tc", 256, 8, (8, 4), scoring="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5)
ROUTINGS = {
    "v2": V2,
    "v2-groups": _routing("group_limited_greedy", 160, 6, (8, 3), routed_scaling_factor=16.0),
    "v3": V3,
    "v3-no-groups": replace(V3, num_groups=1, topk_groups=1, norm_topk_prob=False),
    "v3-groups-of-one": replace(V3, num_experts=12, top_k=3, num_groups=12, topk_groups=5),
    "qwen3": _routing("greedy", 128, 8, (1, 1), norm_topk_prob=True),
    "odd": _routing("greedy", 37, 5, (1, 1)),
}
MODELS = ("v2", "v2-groups", "v2-yarn", "v3", "v3-yarn", "v3-halves", "qwen3", "qwen3-no-norm")
"""Of checkpoints.CONFIGS, one of each kind; the last has a head tied to its embedding."""
ROPES = {
    "pairs": RopeConfig(rope_type="default", theta=10000.0, dim=64, interleaved=True),
    "yarn": RopeConfig(
        rope_type="yarn", theta=10000.0, dim=8, interleaved=True, factor=40.0, original_max_position_embeddings=64
    ),
    "halves": RopeConfig(rope_type="default", theta=1e6, dim=128, interleaved=False),
    "odd": RopeConfig(rope_type="default", theta=1e6, dim=20, interleaved=False),
}


class Draw:
    """Random tensors of one device and dtype; rows of NaN where wanted."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def apart(self, num_rows: int, width: int, more: int = 16) -> Tensor:
        """[num_rows, width] whose rows lie apart, as a part of a merged projection's result."""
        return self(num_rows, width + more)[:, more // 2 : more // 2 + width]

    def places(self, num_slots: int, num_rows: int, like: Tensor) -> Places:
        """For `num_slots` of so many rows [T, N] as `like`, all different, every fourth nowhere; rows lie apart."""
        rows = self.apart(2 * num_rows + 1, like.shape[1])
        slots = torch.randperm(len(rows), generator=self._generator)[:num_slots].to(self.device)
        slots[1::4] = -1
        return Places(rows, slots)

    def rotation(self, rope: RopeConfig, num_rows: int) -> Rotation:
        positions = torch.randint(MAX_POSITION, (num_rows,), generator=self._generator).to(self.device)
        return RotaryEmbedding(rope, self.device)(positions, MAX_POSITION)


def is_padding(num_rows: int, device: torch.device) -> Tensor:
    """bool [num_rows]: every third row, not the first."""
    return torch.arange(num_rows, device=device) % 3 == 2


def spoil(*tensors: Tensor) -> None:
    """NaN in the padding rows."""
    for x in tensors:
        x[is_padding(len(x), x.device)] = torch.nan


def assert_rounded_once(what: str, got: Tensor, exact: Tensor, scale: float = 1.0) -> None:
    """got: what `exact` (fp64) is in got's dtype, but for fp32's errors in sums of numbers around `scale`."""
    assert got.shape == exact.shape, f"{what}: {tuple(got.shape)} instead of {tuple(exact.shape)}"
    keep = ~is_padding(len(exact), exact.device)
    got, exact = got[keep], exact[keep]
    error = (got.double() - exact).abs()
    allowed = 0.5 * torch.finfo(got.dtype).eps * exact.abs() * (1 + FP32_SLACK) + FP32_SLACK * (exact.abs() + scale)
    excess = (error / allowed).nan_to_num(torch.inf).max().item() if error.numel() else 0.0
    assert excess <= 1, (
        f"{what} {tuple(got.shape)} {got.dtype}: {excess:.2f} × the allowed error, largest error {error.max():.3g} "
        f"where values reach {exact.abs().max():.3g}"
    )


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    """x fp64 [T, heads, P]."""
    half = x.shape[-1] // 2
    cos, sin = (part[:, None] for part in rotation.angles.double().split(half, dim=-1))
    if rotation.is_interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def check_norms(kernels: Kernels, draw: Draw, num_rows: int, width: int) -> None:
    weight, residual = draw(width), draw(num_rows, width)
    for name, x in (("together", draw(num_rows, width)), ("apart", draw.apart(num_rows, width))):
        spoil(x)
        assert_rounded_once(f"rms_norm, rows {name}", kernels.rms_norm(x, weight, EPS), exact_norm(x, weight), 8)
        for beside in (None, draw(num_rows, width), draw.apart(num_rows, width)):
            normed, total = kernels.add_rms_norm(x, residual.clone(), weight, EPS, beside)
            exact = residual.double() + x.double() + (0.0 if beside is None else beside.double())
            what = f"rows {name}, {'two' if beside is None else 'three'} summands"
            assert_rounded_once(f"the sum, {what}", total, exact)
            assert_rounded_once(f"add_rms_norm, {what}", normed, exact_norm(exact, weight), 8)


def check_silu_mul(kernels: Kernels, draw: Draw, num_rows: int, width: int) -> None:
    for name, x in (("together", 3 * draw(num_rows, 2 * width)), ("apart", draw.apart(num_rows, 2 * width))):
        spoil(x)
        gate, up = x.double().chunk(2, dim=-1)
        assert_rounded_once(f"silu_mul, rows {name}", kernels.silu_mul(x), gate / (1 + (-gate).exp()) * up, 8)


def check_latent_rows(kernels: Kernels, draw: Draw, num_rows: int, rope: str, num_heads: int, plain: int) -> None:
    rotation, rotated, width = draw.rotation(ROPES[rope], num_rows), ROPES[rope].dim, 4 * plain
    weight, head = draw(width), plain + rotated
    for name, q in (("together", draw(num_rows, num_heads * head)), ("apart", draw.apart(num_rows, num_heads * head))):
        compressed, k_rot = draw.apart(num_rows, width), draw.apart(num_rows, rotated)
        spoil(q, compressed, k_rot)
        heads = q.unflatten(1, (num_heads, head))
        exact = heads.double()
        exact = torch.cat((exact[..., :plain], exact_rotation(exact[..., plain:], rotation)), dim=-1)
        exact_key = exact_rotation(k_rot.double()[:, None], rotation)[:, 0]
        given = heads.clone() if name == "together" else heads
        query, latent, is_stored = kernels.latent_rows(given, compressed, k_rot, weight, EPS, rotation)
        assert not is_stored, "there are no places"
        assert query.is_contiguous()
        assert latent.is_contiguous()
        assert_rounded_once(f"query, rows {name}", query, exact, 8)
        assert_rounded_once("latent, normalised", latent[:, :width], exact_norm(compressed, weight), 8)
        assert_rounded_once("latent, rotated", latent[:, width:], exact_key, 8)
        for num_slots in {0, num_rows // 2, num_rows}:
            given, places = heads.clone() if name == "together" else heads, draw.places(num_slots, num_rows, latent)
            before = places.rows.clone()
            again = kernels.latent_rows(given, compressed, k_rot, weight, EPS, rotation, places)
            assert_same_bits("query, with places", again[0], query)
            assert_same_bits("latent, with places", again[1], latent)
            check_places(places, before, latent, again[2])


def check_places(places: Places, before: Tensor, x: Tensor, is_stored: bool) -> None:
    """Rows of x, and nothing else, lie at `places`, which held `before`: if they are said to be stored."""
    if is_stored:
        kept = places.slots >= 0
        before[places.slots[kept]] = x[: len(places.slots)][kept]
    assert_same_bits("places", places.rows, before)


def assert_same_bits(what: str, got: Tensor, expected: Tensor) -> None:
    def message(found: str) -> str:
        return f"{what}: {found}"

    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=message)


def check_normed_heads(kernels: Kernels, draw: Draw, num_rows: int, rope: str, num_heads: int, num_keys: int) -> None:
    rotation, width = draw.rotation(ROPES[rope], num_rows), ROPES[rope].dim
    weights = draw(width), draw(width)
    merged = draw(num_rows, num_heads + 2 * num_keys, width)
    spoil(merged)
    heads = merged.split((num_heads, num_keys, num_keys), dim=1)[:2]
    found = kernels.normed_heads(*heads, *weights, EPS, rotation)
    for name, x, weight, got in zip(("query", "key"), heads, weights, found, strict=True):
        assert got.is_contiguous()
        assert_rounded_once(name, got, exact_rotation(exact_norm(x, weight), rotation), 16)


def check_route(
    kernels: Kernels, draw: Draw, num_rows: int, name: str, width: int, weight_dtype: torch.dtype = torch.float32
) -> None:
    """The choice is the best that fp64 scores allow; the weights are those of the choice."""
    config = ROUTINGS[name]
    weight = draw(config.num_experts, width, dtype=weight_dtype) * width**-0.5
    bias = 0.3 * draw(config.num_experts, dtype=torch.float32) if config.topk_method == "noaux_tc" else None
    x = draw(num_rows, width)
    spoil(x)
    padding = is_padding(num_rows, draw.device)
    logits = x.double() @ weight.double().T
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    exact_weights, exact_ids = routing.choose(scores, bias, config)
    for given in (None, padding):
        weights, ids = kernels.route(x, weight, bias, config, given)
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
        assert weights.shape == ids.shape == (num_rows, config.top_k)
        if num_rows == 0:
            continue
        assert int(ids.min()) >= (0 if given is None else routing.DROPPED)
        assert int(ids.max()) < config.num_experts
        if given is not None:
            assert bool((ids[padding] == routing.DROPPED).all()), "padding rows have experts"
        kept, best = ids[~padding], exact_ids[~padding]
        assert all(len(set(row)) == config.top_k for row in kept.tolist()), "an expert was chosen twice"
        choice = (scores if bias is None else scores + bias)[~padding]
        _assert_near(f"route {name}: choice", choice.gather(1, kept), choice.gather(1, best))
        same = kept == best
        _assert_near(f"route {name}: weights", weights[~padding][same], exact_weights[~padding][same])
        assert float(same.double().mean()) > 0.99


def _assert_near(what: str, got: Tensor, exact: Tensor) -> None:
    error = (got.double() - exact).abs() / (exact.abs() + 1e-3)
    worst = error.nan_to_num(torch.inf).max().item() if error.numel() else 0.0
    assert worst < 2e-5, f"{what} {tuple(got.shape)}: relative error {worst:.3g}"
