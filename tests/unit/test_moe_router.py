"""The router against transformers' routers, and its own errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import PLAIN_MOE
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hocket.config.moe import MoEConfig
from hocket.errors import ConfigError
from hocket.moe.router import Router

HIDDEN, EXPERTS, ROWS = 48, 32, 257
V2 = replace(
    PLAIN_MOE,
    num_experts=EXPERTS,
    top_k=6,
    num_groups=8,
    topk_groups=3,
    norm_topk_prob=False,
    routed_scaling_factor=16.0,
)
V2_GROUPS = replace(V2, topk_method="group_limited_greedy")
V3 = replace(V2, scoring="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5)
QWEN = replace(V2, num_groups=1, topk_groups=1, norm_topk_prob=True, routed_scaling_factor=1.0, top_k=8)


def peer(config: MoEConfig) -> nn.Module:
    """transformers' router of the same shape."""
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": config.top_k, "num_attention_heads": 4}
    if config.topk_method == "greedy" and config.num_groups == 1:
        qwen = Qwen3MoeConfig(**shape, num_experts=EXPERTS, norm_topk_prob=config.norm_topk_prob)
        return Qwen3MoeTopKRouter(qwen)
    shape |= {
        "n_routed_experts": EXPERTS,
        "n_group": config.num_groups,
        "topk_group": config.topk_groups,
        "routed_scaling_factor": config.routed_scaling_factor,
    }
    if config.topk_method == "noaux_tc":
        return DeepseekV3TopkRouter(DeepseekV3Config(**shape, norm_topk_prob=config.norm_topk_prob))
    return DeepseekV2TopkRouter(DeepseekV2Config(**shape, topk_method=config.topk_method))


def dense(weights: Tensor, ids: Tensor) -> Tensor:
    """[T, E]: each token's weight on each expert, whatever the order of the slots."""
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids, weights.float())


def routers(config: MoEConfig, weight_dtype: torch.dtype, seed: int) -> tuple[Router, nn.Module]:
    torch.manual_seed(seed)
    ours, theirs = Router(config, HIDDEN, dtype=weight_dtype), peer(config).to(weight_dtype)
    weight = torch.randn(EXPERTS, HIDDEN)
    ours.weight.copy_(weight)
    theirs.weight.data = weight.to(weight_dtype)
    if ours.e_score_correction_bias is not None:
        bias = torch.randn(EXPERTS) * 0.5  # strong enough to change most choices
        ours.e_score_correction_bias.copy_(bias)
        theirs.e_score_correction_bias = bias
    return ours, theirs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        V2,
        V2_GROUPS,
        V3,
        replace(V3, norm_topk_prob=False),
        replace(V3, num_groups=1, topk_groups=1),
        QWEN,
        replace(QWEN, norm_topk_prob=False),
    ],
    ids=["v2", "v2-groups", "v3", "v3-no-norm", "v3-no-groups", "qwen3", "qwen3-no-norm"],
)
@torch.no_grad()
def test_same_as_transformers(config: MoEConfig, dtype: torch.dtype, seed: int) -> None:
    is_qwen = config in (QWEN, replace(QWEN, norm_topk_prob=False))
    ours, theirs = routers(config, dtype if is_qwen else torch.float32, seed)
    x = torch.randn(ROWS, HIDDEN).to(dtype)
    weights, ids = ours(x)
    logits, peer_weights, peer_ids = theirs(x)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape == (ROWS, config.top_k)
    # Random fp32 logits have no ties. Qwen3's in bf16 do, and there both may rightly choose differently.
    best = logits.sort(descending=True).values
    is_clear = best[:, config.top_k - 1] > best[:, config.top_k] if is_qwen else torch.ones(ROWS, dtype=torch.bool)
    assert is_clear.float().mean() > 0.8
    # transformers rounds Qwen3's weights to the model's dtype; ours stay fp32.
    got = dense(weights.to(peer_weights.dtype), ids)[is_clear]
    torch.testing.assert_close(got, dense(peer_weights, peer_ids)[is_clear], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_the_bias_changes_choices_but_not_weights() -> None:
    torch.manual_seed(0)
    router = Router(replace(V3, norm_topk_prob=False, routed_scaling_factor=1.0), HIDDEN)
    nn.init.normal_(router.weight)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[5] = 10.0
    x = torch.randn(64, HIDDEN)
    weights, ids = router(x)
    assert (ids == 5).any(dim=1).all()
    scores = torch.sigmoid(x @ router.weight.T)
    torch.testing.assert_close(weights, scores.gather(1, ids))


@torch.no_grad()
def test_groups_limit_the_choice() -> None:
    torch.manual_seed(0)
    for config in (V2_GROUPS, V3):
        router = Router(config, HIDDEN)
        nn.init.normal_(router.weight)
        _, ids = router(torch.randn(64, HIDDEN))
        groups = ids // (EXPERTS // config.num_groups)
        assert max(len(set(row.tolist())) for row in groups) <= config.topk_groups


@torch.no_grad()
def test_rows_do_not_meet_and_may_be_none() -> None:
    torch.manual_seed(0)
    router = Router(V3, HIDDEN)
    nn.init.normal_(router.weight)
    x = torch.randn(16, HIDDEN)
    clean = router(x[:8])
    x[8:] = torch.nan
    weights, ids = router(x)
    assert torch.equal(ids[:8], clean[1])
    assert torch.allclose(weights[:8], clean[0])
    assert ids.min() >= 0
    assert ids.max() < EXPERTS
    assert router(x[:0])[1].shape == (0, V3.top_k)


def test_parameters_are_named_as_in_checkpoints() -> None:
    assert set(Router(V3, HIDDEN).state_dict()) == {"weight", "e_score_correction_bias"}
    assert set(Router(V2, HIDDEN).state_dict()) == {"weight"}
    assert all(p.dtype == torch.float32 for p in Router(V3, HIDDEN).parameters())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scoring": "tanh"}, "scoring"),
        ({"topk_method": "best"}, "topk_method"),
        ({"topk_groups": 9}, "topk_group"),
        ({"topk_groups": 0}, "topk_group"),
        ({"num_groups": 5}, "topk_group"),
        ({"top_k": 13}, "num_experts_per_tok"),
        ({"top_k": 0}, "num_experts_per_tok"),
    ],
)
def test_wrong_configurations(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Router(replace(V3, **change), HIDDEN)
    assert caught.value.field == field
