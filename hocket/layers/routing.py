"""Chooses experts by their scores, in plain PyTorch. Knows nothing of logits, of ranks or of what an expert computes.

Shapes: T tokens, E experts, K top-k, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.config.moe import MoEConfig

DROPPED = -1
"""The expert id of a slot that no expert computes: padding, or an expert of another rank."""
NORM_EPS = 1e-20


def choose(scores: Tensor, bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """scores fp32 [T, E], correction bias [E] → (weights fp32 [T, K], expert ids int64 [T, K]), best expert first."""
    choice = scores if bias is None else scores + bias
    topk_ids = _best_groups(choice, config).topk(config.top_k, dim=-1).indices
    topk_weights = scores.gather(-1, topk_ids)
    if config.norm_topk_prob:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + NORM_EPS)
    return topk_weights * config.routed_scaling_factor, topk_ids


def limits_groups(config: MoEConfig) -> bool:
    """Whether a token's experts must come from its best groups."""
    return config.topk_method != "greedy" and config.topk_groups < config.num_groups


def _best_groups(choice: Tensor, config: MoEConfig) -> Tensor:
    """choice [T, E] with -inf for experts outside the token's best groups.

    A group's score is its best expert's (DeepSeek-V2) or the sum of its two best (DeepSeek-V3).
    """
    if not limits_groups(config):
        return choice
    grouped = choice.view(choice.shape[0], config.num_groups, config.num_experts // config.num_groups)
    if config.topk_method == "noaux_tc":
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    else:
        group_scores = grouped.amax(dim=-1)
    best = group_scores.topk(config.topk_groups, dim=-1).indices
    is_other = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(is_other.unsqueeze(-1), float("-inf")).view(choice.shape)
