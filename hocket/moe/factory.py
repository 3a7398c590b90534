"""Builds the sparse layers of a model from names and sizes. Knows which backends were asked for, not what they do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.config.moe import MoEConfig
from hocket.dist.mesh import Mesh
from hocket.errors import ConfigError
from hocket.layers.kernels import PLAIN, Kernels
from hocket.moe.experts.base import Experts
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.experts.registry import suitable_class
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.router import Router
from hocket.moe.transport.registry import build_transport

FP8_BACKENDS = ("auto", "deep_gemm")
"""Those under which a checkpoint in fp8 runs in fp8; with others its experts are expanded."""


class MoEFactory:
    """One per rank. `transport` and `experts_backend` are names; all layers share the transport.

    Where `mesh` has no expert-parallel group, the placement is over one rank, which then holds all experts.

    Raises:
        BackendUnavailable: no such transport or experts backend here.
        ConfigError: the placement is for another number of ranks.
    """

    def __init__(self, mesh: Mesh, placement: ExpertPlacement, transport: str, experts_backend: str) -> None:
        if placement.num_ranks != mesh.ep_size:
            raise ConfigError("placement.num_ranks", placement.num_ranks, f"{mesh.ep_size} (ranks sharing experts)")
        self.placement = placement
        self.rank = mesh.ep_rank
        self.transport = build_transport(transport, placement, rank=self.rank, group=mesh.ep_group, device=mesh.device)
        self._local_id_of: Tensor | None = None
        if placement.num_ranks > 1:
            self._local_id_of = torch.tensor(placement.local_id_of(self.rank), device=mesh.device)
        self._experts_backend = experts_backend
        self._experts_classes: dict[tuple[int, int, torch.dtype, str], type[Experts]] = {}

    def build(
        self,
        config: MoEConfig,
        hidden_size: int,
        hidden_act: str,
        shared_experts: nn.Module | None,
        device: torch.device,
        dtype: torch.dtype,
        router_dtype: torch.dtype = torch.float32,
        kernels: Kernels = PLAIN,
    ) -> MoELayer:
        """One sparse layer with this rank's experts, weights not yet set.

        `router_dtype` is that of the router's weight and logits: fp32 for DeepSeek, the model's for Qwen3-MoE.
        """
        if config.num_experts != self.placement.num_experts:
            raise ConfigError("num_experts", config.num_experts, f"{self.placement.num_experts} (as placed)")
        experts = self._experts_class(hidden_size, config.intermediate_size, dtype, device)(
            len(self.placement.experts_of(self.rank)),
            hidden_size,
            config.intermediate_size,
            hidden_act=hidden_act,
            num_experts=config.num_experts,
            local_id_of=self._local_id_of,
            device=device,
            dtype=dtype,
        )
        router = Router(config, hidden_size, device=device, dtype=router_dtype, kernels=kernels)
        return MoELayer(router, experts, self.transport, shared_experts)

    def fp8_experts(self, experts: Experts, dtype: torch.dtype) -> Fp8Experts | None:
        """What stands in for `experts` of a checkpoint in fp8; None where a backend that has no fp8 was asked for."""
        if self._experts_backend not in FP8_BACKENDS:
            return None
        return Fp8Experts(
            *experts.w2.shape,
            num_experts=experts.num_experts,
            local_id_of=experts.local_id_of,
            device=experts.w2.device,
            dtype=dtype,
        )

    def _experts_class(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device
    ) -> type[Experts]:
        """Chosen once per shape, so that a stand-in is reported once and not for each layer."""
        key = hidden_size, intermediate_size, dtype, device.type
        if key not in self._experts_classes:
            self._experts_classes[key] = suitable_class(self._experts_backend, *key)
        return self._experts_classes[key]


def experts_classes(model: nn.Module) -> list[type[Experts]]:
    """The experts backends that the layers of a model have, by name."""
    found = {type(module.experts) for module in model.modules() if isinstance(module, MoELayer)}
    return sorted(found, key=lambda backend: backend.name)
