"""Hand-written forward and backward passes of the three costly parts of the model, for training on a CPU.

Each is a ``torch.autograd.Function`` over plain matrix products: those are where bfloat16 is fast on a CPU, and
writing the backward pass by hand avoids masked-out work, scatter-adds and the storing of large temporaries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION_CHUNK = 64
LOSS_CHUNK = 512


class _CausalAttention(torch.autograd.Function):
    """Attention by chunks of queries, each over the keys up to its end."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q = q * scale
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        mask = torch.full((ATTENTION_CHUNK, ATTENTION_CHUNK), -1e4, dtype=q.dtype).triu(1)
        saved = []
        for start in range(0, q.shape[1], ATTENTION_CHUNK):
            end = min(start + ATTENTION_CHUNK, q.shape[1])
            scores = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2))
            scores[:, :, start:end].add_(mask[: end - start, : end - start])
            probs = torch.softmax(scores, -1)
            out[:, start:end] = torch.bmm(probs, v[:, :end])
            saved.append(probs)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *saved = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for probs, start in zip(saved, range(0, q.shape[1], ATTENTION_CHUNK), strict=True):
            end = start + probs.shape[1]
            g = grad[:, start:end]
            dv[:, :end] += torch.bmm(probs.transpose(1, 2), g)
            dprobs = torch.bmm(g, v[:, :end].transpose(1, 2))
            dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype)
            dq[:, start:end] = torch.bmm(dscores, k[:, :end])
            dk[:, :end] += torch.bmm(dscores.transpose(1, 2), q[:, start:end])
        return dq * ctx.scale, dk, dv, None


class _RoutedExperts(torch.autograd.Function):
    """Expert networks over the (token, expert) pairs, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        top_k = index.shape[1]
        order = index.reshape(-1).argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        token = order // top_k
        counts = torch.bincount(index.reshape(-1), minlength=gate_up.shape[0]).tolist()
        rows = x.index_select(0, token)
        inner = x.new_empty(rows.shape[0], gate_up.shape[1])
        act = x.new_empty(rows.shape[0], down.shape[2])
        result = torch.empty_like(rows)
        down_t = down.transpose(1, 2).contiguous()
        start = 0
        for e, count in enumerate(counts):
            end = start + count
            if count:
                torch.mm(rows[start:end], gate_up[e].t(), out=inner[start:end])
                gate, up = inner[start:end].chunk(2, -1)
                torch.mul(F.silu(gate), up, out=act[start:end])
                torch.mm(act[start:end], down_t[e], out=result[start:end])
            start = end
        ctx.counts = counts
        ctx.save_for_backward(token, place, weight, rows, inner, act, result, gate_up, down)
        slots = result.index_select(0, place).view(-1, top_k, x.shape[1])
        return torch.bmm(weight.to(x.dtype).unsqueeze(1), slots).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        token, place, weight, rows, inner, act, result, gate_up, down = ctx.saved_tensors
        top_k = weight.shape[1]
        slots = result.index_select(0, place).view(-1, top_k, grad.shape[1])
        dweight = torch.bmm(slots, grad.unsqueeze(2)).squeeze(2).to(weight.dtype)
        by_row = torch.empty_like(place)
        by_row[place] = torch.arange(place.numel())
        dresult = grad.index_select(0, token)
        dresult *= weight.reshape(-1).index_select(0, by_row).to(grad.dtype).unsqueeze(1)
        dgate_up, ddown = torch.zeros_like(gate_up), torch.zeros_like(down)
        dinner, drows = torch.empty_like(inner), torch.empty_like(rows)
        start = 0
        for e, count in enumerate(ctx.counts):
            end = start + count
            if count:
                torch.mm(dresult[start:end].t(), act[start:end], out=ddown[e])
                dact = torch.mm(dresult[start:end], down[e])
                gate, up = inner[start:end].chunk(2, -1)
                dgate, dup = dinner[start:end].chunk(2, -1)
                dgate.copy_(torch.ops.aten.silu_backward(dact * up, gate))
                torch.mul(dact, F.silu(gate), out=dup)
                torch.mm(dinner[start:end].t(), rows[start:end], out=dgate_up[e])
                torch.mm(dinner[start:end], gate_up[e], out=drows[start:end])
            start = end
        dx = drows.index_select(0, place).view(-1, top_k, grad.shape[1]).sum(1)
        return dx, None, dweight, dgate_up, ddown


class _LinearCrossEntropy(torch.autograd.Function):
    """Output product and mean cross-entropy, by chunks of tokens; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32)
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, x.shape[0], LOSS_CHUNK):
            part, goal = x[start : start + LOSS_CHUNK], target[start : start + LOSS_CHUNK].unsqueeze(1)
            logp = torch.log_softmax((part @ weight.t()).float(), -1)
            total -= logp.gather(1, goal).sum()
            grad = logp.exp_()
            grad.scatter_add_(1, goal, grad.new_full(goal.shape, -1.0))
            grad = grad.to(x.dtype)
            torch.mm(grad, weight, out=dx[start : start + LOSS_CHUNK])
            dweight += grad.t() @ part
        ctx.save_for_backward(dx, dweight)
        ctx.rows, ctx.dtype = x.shape[0], weight.dtype
        return total / x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dweight = ctx.saved_tensors
        scale = grad / ctx.rows
        return dx * scale.to(dx.dtype), (dweight * scale).to(ctx.dtype), None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally; all three are (batch x heads, length, width) and may differ in width."""
    return _CausalAttention.apply(q, k, v, scale)


def routed_experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts; ``index`` and ``weight`` are (tokens, top-k)."""
    return _RoutedExperts.apply(x, index, weight, gate_up, down)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``x @ weight.T`` against ``target``."""
    return _LinearCrossEntropy.apply(x, weight, target)
