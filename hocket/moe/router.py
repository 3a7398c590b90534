"""Chooses the experts of each token. Knows nothing of ranks, padding or what an expert computes.

Shapes: T tokens, D hidden, E experts, K top-k, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.config.moe import MoEConfig
from hocket.errors import ConfigError
from hocket.layers.kernels import PLAIN, Kernels

SCORINGS = ("softmax", "sigmoid")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
NORM_EPS = 1e-20


class Router(nn.Module):
    """Top-k routing of DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437, §2.1.2) and Qwen3-MoE.

    Logits are computed in `dtype`, the dtype of `weight` [E, D]: fp32 for DeepSeek, the model's own for Qwen3-MoE.
    Scores, their normalisation and the returned weights are fp32. `noaux_tc` adds the parameter
    `e_score_correction_bias` [E] (fp32), which changes which experts are chosen but not their weights.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = PLAIN,
    ) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.kernels = kernels
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, hidden_size, device=device, dtype=dtype), requires_grad=False
        )
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.topk_method == "noaux_tc":
            bias = torch.zeros(config.num_experts, device=device, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] → (weights fp32 [T, K], expert ids int64 [T, K]), best expert first. Finite for finite x."""
        logits = self.kernels.linear(x.to(self.weight.dtype), self.weight).float()
        scores = logits.softmax(dim=-1) if self.config.scoring == "softmax" else self.kernels.sigmoid(logits)
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        topk_ids = self._best_groups(choice).topk(self.config.top_k, dim=-1).indices
        topk_weights = scores.gather(-1, topk_ids)
        if self.config.norm_topk_prob:
            topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + NORM_EPS)
        return topk_weights * self.config.routed_scaling_factor, topk_ids

    def _best_groups(self, choice: Tensor) -> Tensor:
        """choice [T, E] with -inf for experts outside the token's best groups.

        A group's score is its best expert's (DeepSeek-V2) or the sum of its two best (DeepSeek-V3).
        """
        config = self.config
        if config.topk_method == "greedy" or config.topk_groups == config.num_groups:
            return choice
        grouped = choice.view(choice.shape[0], config.num_groups, config.num_experts // config.num_groups)
        if config.topk_method == "noaux_tc":
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        else:
            group_scores = grouped.amax(dim=-1)
        best = group_scores.topk(config.topk_groups, dim=-1).indices
        is_other = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(is_other.unsqueeze(-1), float("-inf")).view(choice.shape)


def _check(config: MoEConfig) -> None:
    if config.scoring not in SCORINGS:
        raise ConfigError("scoring", config.scoring, ", ".join(SCORINGS))
    if config.topk_method not in TOPK_METHODS:
        raise ConfigError("topk_method", config.topk_method, ", ".join(TOPK_METHODS))
    if not 1 <= config.topk_groups <= config.num_groups or config.num_experts % config.num_groups:
        allowed = f"1 to n_group ({config.num_groups}), itself a divisor of {config.num_experts} experts"
        raise ConfigError("topk_group", config.topk_groups, allowed)
    limited = config.topk_method != "greedy"
    reachable = config.num_experts // config.num_groups * config.topk_groups if limited else config.num_experts
    if not 1 <= config.top_k <= reachable:
        raise ConfigError("num_experts_per_tok", config.top_k, f"1 to {reachable} (experts a token may choose from)")
