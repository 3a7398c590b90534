"""The architecture of ``tiny``: a small DeepSeek-V2 (latent attention, fine-grained experts), for training.

Parameters carry the names of the published checkpoints, except that the routed experts of a layer are stacked in
``mlp.experts.gate_up`` and ``mlp.experts.down``.  Master weights are float32; the products run in ``dtype``
(bfloat16 while training, float32 when compared with a reference).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernels import causal_attention, linear_cross_entropy, routed_experts
from torch import Tensor, nn


@dataclass
class TinyConfig:
    """Sizes, under the names that ``config.json`` uses."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    first_k_dense_replace: int = 1
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024
    dropout: float = 0.0  # of the training only

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def normalize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Divide by the root mean square and scale."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise the last dimension; the result has type ``dtype``."""
        return normalize(x, self.weight, self.eps, dtype)


class Linear(nn.Linear):
    """A bias-free product in the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, cast to the input's type."""
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs (2i, 2i+1) of the last dimension; ``x`` is (batch, length, heads, width)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention without a low-rank query."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        heads = c.num_attention_heads
        self.q_proj = Linear(c.hidden_size, heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, 1e-6)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally within each row of ``x`` (batch, length, hidden)."""
        c, heads = self.c, self.c.num_attention_heads
        batch, length, _ = x.shape
        q_nope, q_rope = (
            self.q_proj(x).view(batch, length, heads, -1).split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent, x.dtype)).view(batch, length, heads, -1)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        q_rope = rotate(q_rope, cos, sin)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, heads, -1)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
        q, k, v = (t.transpose(1, 2).reshape(batch * heads, length, -1) for t in (q, k, v))
        out = causal_attention(q, k, v, c.qk_head_dim**-0.5)
        return self.o_proj(out.view(batch, heads, length, -1).transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The stacked weights of a layer's routed experts."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size))


class MoE(nn.Module):
    """Shared expert plus the top-k of the routed experts under a softmax gate (weights not renormalised)."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.gate = Linear(c.hidden_size, c.n_routed_experts)
        self.experts = Experts(c)
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)
        self.balance_loss: Tensor = torch.zeros(())
        self.load: Tensor = torch.zeros(c.n_routed_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to (batch, length, hidden); keeps the balancing loss and the load of this call."""
        c = self.c
        flat = x.reshape(-1, c.hidden_size)
        probs = self.gate(flat.float()).softmax(-1)
        weights, index = probs.topk(c.num_experts_per_tok, -1)
        self.load = torch.bincount(index.reshape(-1), minlength=c.n_routed_experts).float()
        share = self.load / self.load.sum()
        self.balance_loss = c.n_routed_experts * (share * probs.mean(0)).sum()
        routed = routed_experts(
            flat,
            index,
            weights * c.routed_scaling_factor,
            self.experts.gate_up.to(x.dtype),
            self.experts.down.to(x.dtype),
        )
        return routed.view_as(x) + self.shared_experts(x)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, c: TinyConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.drop = nn.Dropout(c.dropout)
        self.mlp = MoE(c) if layer >= c.first_k_dense_replace else MLP(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Map the float32 residual stream to the next layer's."""
        x = x + self.drop(self.self_attn(self.input_layernorm(x, dtype), cos, sin))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x, dtype)))


class Tiny(nn.Module):
    """The whole language model."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        frequency = 1.0 / c.rope_theta ** (torch.arange(0, c.qk_rope_head_dim, 2).float() / c.qk_rope_head_dim)
        angle = torch.arange(c.max_position_embeddings).float()[:, None] * frequency
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initialise: matrices by fan-in, outputs of residual branches at a small scale."""
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.ones_(p)
            elif "embed_tokens" in name:
                nn.init.normal_(p, std=0.5)
            elif "lm_head" in name or name.endswith("gate.weight"):
                nn.init.normal_(p, std=0.02)
            else:
                out = "o_proj" in name or "down" in name
                nn.init.normal_(p, std=p.shape[-1] ** -0.5 * (0.3 if out else 1.0))

    @property
    def moe_layers(self) -> list[MoE]:
        """The layers with routed experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]

    def hidden(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the normalised last hidden states of ``ids`` (batch, length)."""
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length], dtype)
        return self.norm(x, dtype)

    def loss(self, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (mean cross-entropy, mean balancing loss)."""
        h = self.hidden(ids, dtype).flatten(0, 1)
        entropy = linear_cross_entropy(h, self.lm_head.weight.to(dtype), targets.flatten())
        return entropy, torch.stack([m.balance_loss for m in self.moe_layers]).mean()

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logits."""
        return self.lm_head(self.hidden(ids, dtype))
