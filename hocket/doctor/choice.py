"""What a configuration would come to: chosen backends, weights, room for the KV cache. Loads no weights.

A rank's model is built as a rank does it, but of fake tensors, which have shapes and a device and no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore

from hocket.attention.registry import chosen_name
from hocket.cache.storage import bytes_per_block
from hocket.config.engine import EngineConfig
from hocket.dist.collectives import Group
from hocket.dist.mesh import Mesh
from hocket.errors import CapacityError, CheckpointError
from hocket.layers.kernels import Kernels
from hocket.models.accounting import match
from hocket.models.backends import Backends, kernels_for
from hocket.models.base import CausalLM
from hocket.models.checkpoint import Checkpoint
from hocket.models.registry import build_model
from hocket.moe.factory import MoEFactory, experts_classes
from hocket.moe.placement import ExpertPlacement
from hocket.worker.memory import available_bytes, num_cache_blocks


def choice(config: EngineConfig, gpu_free_bytes: int | None) -> dict[str, Any]:
    """{attention, experts, kernels, weights_bytes, free_bytes, cache_blocks, cache_bytes, problems} of rank 0, which
    has the most experts.

    gpu_free_bytes: of the fullest GPU; None: on a CPU, whose memory the ranks of this host share. The cache gets the
    engine's share of what weights leave; a GPU's rank takes off its largest step as well, which only running it tells.
    problems: why it would not start, as far as shapes and the headers of the checkpoint's files tell.

    Raises:
        HocketError: the model cannot be built.
    """
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    kernels = kernels_for(config.deterministic, device)
    attention = chosen_name(config.attention_backend, config.model, dtype, device)
    model, _ = fake_model(config, device, kernels, config.moe_backend)
    weights_bytes = bytes_of(model)
    num_local = config.parallel.data_parallel_size if gpu_free_bytes is None else 1
    free_bytes = available_bytes(torch.device("cpu")) if gpu_free_bytes is None else gpu_free_bytes
    blocks, problem = room(config, weights_bytes, free_bytes, num_local)
    problems = [] if problem is None else [problem]
    try:
        _check_files(config, model)
    except CheckpointError as error:
        problems.append(str(error))
    return {
        "attention": attention,
        "experts": experts_names(model),
        "kernels": kernels.name,
        "weights_bytes": weights_bytes,
        "free_bytes": free_bytes // num_local,
        "cache_blocks": blocks,
        "cache_bytes": blocks * bytes_per_block(config.model, dtype, config.cache.block_size),
        "problems": problems,
    }


def _check_files(config: EngineConfig, model: CausalLM) -> None:
    """Raise CheckpointError where the headers of its files tell that loading would fail."""
    if config.load_format != "dummy":
        with Checkpoint(config.model_path) as checkpoint:
            match(list(model.weight_specs()), checkpoint, config.model)


def room(config: EngineConfig, weights_bytes: int, free_bytes: int, num_local_ranks: int) -> tuple[int, str | None]:
    """(KV-cache blocks of a rank, why there are none): of `free_bytes` that so many ranks share, weights included."""
    block_bytes = bytes_per_block(config.model, getattr(torch, config.dtype), config.cache.block_size)
    try:
        left = free_bytes - weights_bytes * num_local_ranks
        if left <= 0:
            each = free_bytes // num_local_ranks
            raise CapacityError(f"a rank's weights need {weights_bytes:,} bytes, and {each:,} are free for each rank")
        return num_cache_blocks(config, block_bytes, left, num_local_ranks), None
    except CapacityError as error:
        return 0, str(error)


def fake_model(
    config: EngineConfig,
    device: torch.device,
    kernels: Kernels,
    experts_backend: str,
    mode: FakeTensorMode | None = None,
) -> tuple[CausalLM, MoEFactory]:
    """Rank 0's model on `device` of fake tensors, of the `mode` if one is given, with what built its sparse layers.
    It cannot attend: compiling would take long."""
    num_ranks = config.parallel.expert_parallel_size
    group = Group(HashStore(), 0, num_ranks) if num_ranks > 1 else None  # nothing is sent through it
    mesh = Mesh(rank=0, world_size=num_ranks, device=device, ep_group=group)
    strategy = config.parallel.expert_placement_strategy
    placement = ExpertPlacement(config.model.moe.num_experts, num_ranks, strategy)
    backends, dtype = Backends(kernels=kernels), getattr(torch, config.dtype)
    with mode or FakeTensorMode():
        factory = MoEFactory(mesh, placement, config.parallel.all2all_backend, experts_backend)
        return build_model(config.model, factory, device, dtype, backends), factory


def bytes_of(model: CausalLM) -> int:
    """Bytes of its weights and of what lies beside them."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def experts_names(model: CausalLM) -> str:
    """The experts backends that its layers have."""
    return ", ".join(experts.name for experts in experts_classes(model))
