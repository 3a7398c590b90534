"""Chooses the experts of each token. Knows nothing of ranks, padding or what an expert computes.

Shapes: T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.config.moe import MoEConfig
from hocket.errors import ConfigError
from hocket.layers.kernels import PLAIN, Kernels

SCORINGS = ("softmax", "sigmoid")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


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

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, D] → (weights fp32 [T, K], expert ids int64 [T, K]), best expert first. Finite for finite x.

        is_padding bool [T]: rows whose experts are DROPPED.
        """
        return self.kernels.route(x, self.weight, self.e_score_correction_bias, self.config, is_padding)


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
