"""What a rank's memory would hold: weights, KV cache, and what messages and logits need beside them. Runs no model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.cache.storage import bytes_per_block
from hocket.config.engine import EngineConfig
from hocket.doctor.choice import bytes_of, experts_names, fake_model, room
from hocket.doctor.host import gpu_free_bytes
from hocket.envs import FP8
from hocket.layers.kernels import PLAIN
from hocket.models.backends import kernels_for
from hocket.models.quantize import hold_in_fp8
from hocket.moe.factory import FP8_BACKENDS, experts_classes
from hocket.quant.fp8 import without_kernels
from hocket.worker.memory import available_bytes


@dataclass(frozen=True, kw_only=True)
class Held:
    """What rank 0 holds of the model. experts: the backend, on a CPU. num_bytes: of all weights, and of those where all
    runs in fp8 that can (None: nothing would). sends_fp8: rows may then travel in fp8."""

    experts: str
    num_bytes: int
    fp8_bytes: int | None = None
    sends_fp8: bool = False


def memory(
    config: EngineConfig, held: Held, free_bytes: int | None, received_bytes: float, reserved_bytes: float = 0.0
) -> dict[str, Any]:
    """Bytes of rank 0, which has the most experts.

    free_bytes: of each GPU, or of the host, before anything is loaded; None: as measured here, if there is such a
    device. received_bytes, reserved_bytes: the room for what a dispatch brings, and what a transport keeps all the
    time, per token (`messages`).

    {experts: the backend that was chosen (on a CPU; else None), weights_bytes, weights_fp8_bytes (where all runs in fp8
    that can; None: nothing would), kv_bytes_per_token, kv_bytes_per_block, buffers: [{what, bytes, kv_blocks}],
    free_bytes (of a rank; None: unknown), is_given, cache_blocks (beside weights in fp8, if they may be), cache_bytes,
    problem: why there is no room}.
    """
    dtype, is_cpu, cache = getattr(torch, config.dtype), config.device == "cpu", config.cache
    block_bytes = bytes_per_block(config.model, dtype, cache.block_size)
    num_local = config.parallel.data_parallel_size if is_cpu else 1
    is_given = free_bytes is not None
    if free_bytes is None:
        free_bytes = available_bytes(torch.device("cpu")) if is_cpu else gpu_free_bytes()
    blocks, problem = 0, None
    if free_bytes is not None:
        blocks, problem = room(config, held.fp8_bytes or held.num_bytes, free_bytes, num_local)
    limits = config.scheduler
    buffers = {
        "room for the rows of the largest dispatch": int(received_bytes * limits.max_num_batched_tokens),
        "what the transport keeps for dispatches so large": int(reserved_bytes * limits.max_num_batched_tokens),
        "logits of the most requests": limits.max_num_seqs * config.model.vocab_size * torch.float32.itemsize,
    }
    return {
        "experts": held.experts if is_cpu else None,
        "weights_bytes": held.num_bytes,
        "weights_fp8_bytes": held.fp8_bytes,
        "kv_bytes_per_token": bytes_per_block(config.model, dtype, 1),
        "kv_bytes_per_block": block_bytes,
        "buffers": [
            {"what": what, "bytes": size, "kv_blocks": -(-size // block_bytes)}
            for what, size in buffers.items()
            if size
        ],
        "free_bytes": None if free_bytes is None else free_bytes // num_local,
        "is_given": is_given,
        "cache_blocks": blocks,
        "cache_bytes": blocks * block_bytes,
        "problem": problem,
    }


def held_by_first_rank(config: EngineConfig) -> Held:
    """Told by a model of fake tensors. Built for a CPU whatever the device: sizes are the same, and no GPU is needed;
    fp8 then is not taken by itself."""
    cpu = torch.device("cpu")
    if config.device == "cpu":
        model, _ = fake_model(config, cpu, kernels_for(config.deterministic, cpu), config.moe_backend)
        return Held(experts=experts_names(model), num_bytes=bytes_of(model))
    model, _ = fake_model(config, cpu, PLAIN, "reference")
    held = Held(experts=experts_names(model), num_bytes=bytes_of(model))
    quantization = config.model.quantization
    if quantization is None or FP8.get_int(0) == 0 or without_kernels(model.dtype, quantization.block):
        return held
    mode, backend = FakeTensorMode(), "auto" if config.moe_backend in FP8_BACKENDS else "reference"
    in_fp8, factory = fake_model(config, cpu, PLAIN, backend, mode)
    with mode:  # as the model itself does where it runs in fp8
        hold_in_fp8(in_fp8, list(in_fp8.weight_specs()), quantization, factory, in_fp8.dtype)
    sends_fp8 = all(experts.takes_fp8_rows for experts in experts_classes(in_fp8))
    return replace(held, fp8_bytes=bytes_of(in_fp8), sends_fp8=sends_fp8)
