"""What a `config.json` says of the sparse layers, as frozen values. Knows nothing of tensors, ranks or devices."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.config.values import Values
from hocket.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The sparse layers: how many experts, how they are chosen, and which layers have them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared_experts: int
    scoring: str
    topk_method: str
    num_groups: int
    topk_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    layers: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    """What transformers' configuration classes assume where config.json does not have a key."""

    num_shared_experts: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    first_dense: int = 0


_DEFAULTS = {
    "deepseek_v2": _Defaults(num_shared_experts=2),
    "deepseek_v3": _Defaults(
        num_shared_experts=1,
        num_groups=8,
        topk_groups=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_dense=3,
    ),
    "qwen3_moe": _Defaults(),
}


def read_moe(model_type: str, hf: Values, num_layers: int) -> MoEConfig:
    """The sparse layers of a model; ConfigError for values that make no sense."""
    deepseek, default = model_type != "qwen3_moe", _DEFAULTS[model_type]
    experts = hf.whole(hf.first_of("n_routed_experts", "num_local_experts", "num_experts"), most=100_000)
    method = {"deepseek_v3": "noaux_tc", "qwen3_moe": "greedy"}.get(model_type) or hf.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ConfigError("topk_method", method, "greedy, group_limited_greedy, noaux_tc")
    norm = hf.flag("norm_topk_prob", default.norm_topk_prob)
    if model_type == "deepseek_v2" and norm:
        raise ConfigError("norm_topk_prob", True, "false", where="for deepseek_v2 (no published model defines it)")
    moe = MoEConfig(
        num_experts=experts,
        top_k=hf.whole("num_experts_per_tok"),
        intermediate_size=hf.whole("moe_intermediate_size"),
        num_shared_experts=_absent_or_null(hf, "n_shared_experts", default.num_shared_experts, 0) if deepseek else 0,
        scoring="sigmoid" if model_type == "deepseek_v3" else "softmax",
        topk_method=method,
        num_groups=_absent_or_null(hf, "n_group", default.num_groups, 1) if deepseek else 1,
        topk_groups=_absent_or_null(hf, "topk_group", default.topk_groups, 1) if deepseek else 1,
        norm_topk_prob=norm,
        routed_scaling_factor=hf.number("routed_scaling_factor", default.routed_scaling_factor) if deepseek else 1.0,
        layers=_moe_layers(deepseek, hf, num_layers, default.first_dense),
    )
    _check_choice(moe)
    return moe


def _absent_or_null(hf: Values, key: str, absent: int, null: int) -> int:
    """A whole number that published checkpoints switch off with null; 0 is allowed where null means 0."""
    return hf.whole(key, null if key in hf else absent, least=min(null, 1))


def _check_choice(moe: MoEConfig) -> None:
    """Whether so many experts can be chosen from so many groups."""
    if moe.num_experts % moe.num_groups:
        raise ConfigError("n_group", moe.num_groups, f"a divisor of the number of experts ({moe.num_experts})")
    if moe.topk_groups > moe.num_groups:
        raise ConfigError("topk_group", moe.topk_groups, f"at most n_group ({moe.num_groups})")
    within = moe.num_experts
    if moe.topk_method != "greedy":
        within = moe.num_experts // moe.num_groups * moe.topk_groups
    if moe.top_k > within:
        what = "the number of experts" if within == moe.num_experts else "the experts in topk_group groups"
        raise ConfigError("num_experts_per_tok", moe.top_k, f"1 to {within} ({what})")


def _moe_layers(deepseek: bool, hf: Values, num_layers: int, first_dense: int) -> tuple[bool, ...]:
    if deepseek:
        first = hf.whole("first_k_dense_replace", first_dense, least=0)
        every = hf.whole("moe_layer_freq", 1)
        return tuple(i >= first and i % every == 0 for i in range(num_layers))
    step = hf.whole("decoder_sparse_step", 1)
    dense = set(hf.wholes("mlp_only_layers"))
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
