"""The optimiser: Muon for the hidden matrices (those of the experts one by one), AdamW for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Replace each matrix of a batch by an approximately orthogonal one (quintic Newton-Schulz, in bfloat16)."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; weight decay is decoupled and follows the learning rate."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; matrices of one shape are handled in one batch."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                rows, columns = update.shape[-2:]
                if update.ndim == 3 and getattr(p, "packed", 1) > 1:  # gate and up are two matrices
                    rows //= p.packed
                shapes.setdefault((rows, columns), []).append((p, update.reshape(-1, rows, columns)))
            for (rows, columns), items in shapes.items():
                batch = orthogonalize(torch.cat([u for _, u in items]))
                batch *= max(1.0, rows / columns) ** 0.5
                for (p, _), update in zip(items, batch.split([u.shape[0] for _, u in items]), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view_as(p), alpha=-group["lr"])


@dataclass
class Rates:
    """Peak learning rates and decay."""

    matrix: float = 0.02
    embedding: float = 0.01
    head: float = 0.004
    router: float = 0.004
    norm: float = 0.01
    matrix_decay: float = 0.1
    table_decay: float = 0.02


def make_optimizers(model: nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    """Sort the parameters into groups; ``initial_lr`` of each group is its peak rate."""
    matrices: list[nn.Parameter] = []
    tables: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "router": [], "norm": []}
    for name, p in model.named_parameters():
        if "embed_tokens" in name:
            tables["embedding"].append(p)
        elif "lm_head" in name:
            tables["head"].append(p)
        elif name.endswith("mlp.gate.weight"):
            tables["router"].append(p)
        elif p.ndim == 1:
            tables["norm"].append(p)
        else:
            p.packed = 2 if name.endswith("gate_up") else 1  # type: ignore[attr-defined]
            matrices.append(p)
    groups = [
        {"params": params, "lr": getattr(rates, name), "weight_decay": 0.0 if name == "norm" else rates.table_decay}
        for name, params in tables.items()
    ]
    optimizers = [
        Muon(matrices, rates.matrix, 0.95, rates.matrix_decay),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-10, foreach=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers
