"""Makes one rank's model: its transport, layers, backends and weights. Knows no cache, no batches, no steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hocket.config.engine import EngineConfig
from hocket.config.graphs import GraphConfig
from hocket.dist.collectives import gather_texts
from hocket.dist.mesh import Mesh
from hocket.models.backends import backends_for, check_batch_invariance
from hocket.models.base import CausalLM
from hocket.models.loader import LoadReport, dummy_weights, load_weights
from hocket.models.registry import build_model
from hocket.moe.experts.base import Experts
from hocket.moe.factory import MoEFactory, experts_classes
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import StepSizes, Transport
from hocket.moe.transport.link_emulator import LinkEmulator

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
"""Told a phase ("load", "compile", …), how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model with weights. transport: opened, to be closed by the caller. sender: what layers send with, which is the
    transport itself or stretches its transfers. experts: the classes of its layers' experts, each once."""

    model: CausalLM
    transport: Transport
    sender: Transport
    experts: list[type[Experts]]
    load_report: LoadReport


def build(config: EngineConfig, mesh: Mesh, on_progress: OnProgress) -> Built:
    """The model of `config` on this rank. All ranks together.

    Raises:
        BackendUnavailable: a backend does not run here. CheckpointError: the weights are not the model's.
        ConfigError: `deterministic`, and a backend that is not batch-invariant.
    """
    dtype = getattr(torch, config.dtype)
    parallel = config.parallel
    placement = ExpertPlacement(config.model.moe.num_experts, mesh.ep_size, parallel.expert_placement_strategy)
    factory = MoEFactory(mesh, placement, parallel.all2all_backend, config.moe_backend)
    transport = factory.transport
    transport.open(StepSizes.of(config, len(mesh.node_ranks)))
    link = parallel.emulated_link
    if link is not None:
        factory.transport = LinkEmulator(transport, link.latency_us, link.gb_per_s, mesh.device, link.token_bytes)
    backends = backends_for(
        config.attention_backend,
        config.deterministic,
        config.model,
        dtype,
        mesh.device,
        on_compile=lambda done, total: on_progress("compile", done, total),
    )
    model = build_model(config.model, factory, mesh.device, dtype, backends)
    load_report = _load(model, config, on_progress)
    experts = experts_classes(model)
    if all(one.takes_fp8_rows for one in experts):
        transport.send_fp8()
    if config.deterministic:
        check_batch_invariance(model, backends.kernels)
    return Built(model=model, transport=transport, sender=factory.transport, experts=experts, load_report=load_report)


def _load(model: CausalLM, config: EngineConfig, on_progress: OnProgress) -> LoadReport:
    if config.load_format == "dummy":
        return dummy_weights(model, config.seed)
    return load_weights(model, config.model_path, on_progress=lambda done, total: on_progress("load", done, total))


def graph_config(config: EngineConfig, mesh: Mesh, built: Built) -> GraphConfig:
    """What to capture: what the configuration says, nothing where a backend of any rank cannot be captured, since all
    of them capture together."""
    if not config.graphs.sizes:
        return config.graphs
    reason = _uncapturable(built)
    reasons = gather_texts(reason) if mesh.ep_size > 1 else [reason]
    for rank, why in enumerate(reasons):
        if why and rank == mesh.ep_rank:
            logger.warning("no CUDA graphs: %s cannot be captured", why)
        elif why and not reason:
            logger.warning("no CUDA graphs: on rank %d %s cannot be captured", rank, why)
    return replace(config.graphs, sizes=(), split_sizes=()) if any(reasons) else config.graphs


def _uncapturable(built: Built) -> str:
    """Which backends of this rank cannot be captured; "": all can."""
    attention = built.model.backends.attention
    parts = {
        f"attention backend {attention.name}": attention.captures,
        f"transport {built.sender.name}": built.sender.captures,
    } | {f"experts backend {experts.name}": experts.captures for experts in built.experts}
    return " and ".join(name for name, captures in parts.items() if not captures)
