"""Compare the hand-written kernels, forward and backward, with plain PyTorch in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernels import causal_attention, linear_cross_entropy, routed_experts
from torch import Tensor

TOLERANCE = 1e-4


def compare(name: str, ours: Tensor, reference: Tensor, inputs: list[Tensor]) -> None:
    """Compare the values and, for one random upstream gradient, the gradients of ``inputs``."""
    upstream = torch.randn_like(reference)
    pairs = [(ours, reference)]
    pairs += zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(reference, inputs, upstream), strict=True
    )
    worst = max(float((a - b).detach().abs().max() / b.abs().max()) for a, b in pairs)
    print(f"{name:20} largest relative difference {worst:.1e}")
    if worst > TOLERANCE:
        raise SystemExit(f"{name} is wrong")


def plain_experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run every expert on every token and pick."""
    gate, up = torch.einsum("th,efh->tef", x, gate_up).chunk(2, -1)
    outputs = torch.einsum("tef,ehf->teh", F.silu(gate) * up, down)
    return (outputs.gather(1, index[..., None].expand(-1, -1, x.shape[1])) * weight[..., None]).sum(1)


def main() -> None:
    """Run the three comparisons."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 150, width, requires_grad=True) for width in (48, 48, 32))
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)
    compare("causal_attention", causal_attention(q, k, v, 0.1), reference, [q, k, v])

    x = torch.randn(100, 32, requires_grad=True)
    gate_up, down = torch.randn(8, 32, 32, requires_grad=True), torch.randn(8, 32, 16, requires_grad=True)
    weight, index = torch.randn(100, 8).softmax(-1).topk(3, -1)
    weight.requires_grad_()
    ours = routed_experts(x, index, weight, gate_up, down)
    compare("routed_experts", ours, plain_experts(x, index, weight, gate_up, down), [x, weight, gate_up, down])

    x, table = torch.randn(1500, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
    target = torch.randint(0, 100, (1500,))
    ours = linear_cross_entropy(x, table, target)
    compare("linear_cross_entropy", ours, F.cross_entropy(x @ table.t(), target), [x, table])


if __name__ == "__main__":
    main()
