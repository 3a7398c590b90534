"""What a configuration would do, as plain values, each told by the part that would do it. Starts no rank, loads no
weights and starts no CUDA."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from hocket.attention.flashinfer_library import MIN_CAPABILITY, HeadShapes, without_kernels
from hocket.attention.registry import AUTO as ATTENTION_ORDER
from hocket.attention.registry import SdpaAttention
from hocket.config.backends import CPU_EXPERTS
from hocket.config.devices import num_gpus
from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.errors import HocketError
from hocket.explain.memory import held_by_first_rank, memory
from hocket.explain.messages import SAMPLE_TOKENS, messages
from hocket.explain.options import resolve_what_can_be, resolved_options
from hocket.explain.order import orders
from hocket.explain.steps import cases, splits
from hocket.moe.experts.registry import AUTO as EXPERTS_ORDER
from hocket.moe.experts.registry import experts_class
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.moe.transport.registry import traits, transport_class
from hocket.overlap import schedule
from hocket.overlap.sm_budget import comm_share


def describe(options: Options, free_bytes: int | None = None) -> tuple[dict[str, Any], HocketError | None]:
    """Everything there is to say, and the first refusal, if an option is refused: what is said then is of the others.

    free_bytes: memory to assume, of each GPU or of the host; None: what is free here. Where the device is asked to be
    "cuda" and there are too few GPUs here, one for each rank is assumed (`assumed_gpus`).

    Raises:
        HocketError: nothing can be said: the model cannot be read, or an environment variable is wrong.
    """
    too_few = options.device == "cuda" and num_gpus() < options.data_parallel_size
    assumed = options.data_parallel_size if too_few else None
    options, config, why, refused = resolve_what_can_be(options, assumed)
    found = _shape(config) | {"assumed_gpus": assumed, "gpus_here": num_gpus()}
    held = held_by_first_rank(config)
    sent = messages(config, held.sends_fp8)
    found["messages"] = {"sample_tokens": SAMPLE_TOKENS, "transports": sent}
    rooms = next(((one["received_bytes"], one["reserved_bytes"]) for one in sent if one["is_chosen"]), (0.0, 0.0))
    found["memory"] = memory(config, held, free_bytes, *rooms)
    found["backends"] = _backends(config, found["memory"])
    uncapturable = _uncapturable(config, found["backends"]) if config.graphs.sizes else []
    graphs = config.graphs
    found["graphs"] = {
        "sizes": list(graphs.sizes),
        "split_sizes": list(graphs.split_sizes),
        "uncapturable": uncapturable,
    }
    overlap, captures = config.overlap, bool(config.graphs.sizes) and not uncapturable
    if overlap.num_ubatches > 1:
        found |= {
            "executor": overlap.executor,
            "sms": _sms(config),
            "splits": {phase: splits(config, phase, captures) for phase in schedule.PHASES},
            "schedules": orders(config),
        }
    if overlap.num_ubatches > 1 or config.graphs.sizes:
        found["steps"] = cases(config, captures)
    found["options"] = [*resolved_options(options, config, why), *_chosen_by_ranks(config, found["backends"])]
    found["refused"] = [{"option": name, "given": given, "why": str(error)} for name, given, error in refused]
    return found, refused[0][2] if refused else None


def _shape(config: EngineConfig) -> dict[str, Any]:
    model, parallel, limits = config.model, config.parallel, config.scheduler
    moe, mla, link = model.moe, model.mla, parallel.emulated_link
    placement = ExpertPlacement(moe.num_experts, parallel.expert_parallel_size, parallel.expert_placement_strategy)
    return {
        "model": {
            "path": config.model_path,
            "type": model.model_type,
            "layers": model.num_layers,
            "sparse_layers": sum(moe.layers),
            "dtype": config.dtype,
            "hidden_size": model.hidden_size,
            "heads": model.num_heads,
            "kv_heads": None if mla else model.num_kv_heads,
            "head_dim": mla.qk_head_dim if mla else model.head_dim,
            "latent_dim": mla.latent_dim if mla else None,
            "expert_width": moe.intermediate_size,
            "dense_width": model.intermediate_size,
            "vocabulary": model.vocab_size,
            "fp8_blocks": list(model.quantization.block) if model.quantization else None,
        },
        "device": config.device,
        "ranks": parallel.data_parallel_size,
        "experts": {
            "total": moe.num_experts,
            "per_token": moe.top_k,
            "by_rank": [len(placement.experts_of(rank)) for rank in range(placement.num_ranks)],
            "shared": moe.num_shared_experts,
        },
        "limits": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "block_size": config.cache.block_size,
        },
        "transport": parallel.all2all_backend,
        "transport_traits": _traits(config),
        "emulated_link": None if link is None else asdict(link),
        "num_ubatches": config.overlap.num_ubatches,
        "is_forced": config.overlap.force_split,
    }


def _traits(config: EngineConfig) -> dict[str, Any]:
    """Of the transport that would run, over the emulated link where there is one."""
    found = traits(config.parallel.all2all_backend)
    if config.parallel.emulated_link is not None:
        found |= {"is_apart": LinkEmulator.is_apart}
    return found


def _sms(config: EngineConfig) -> dict[str, Any]:
    """{comm: how many multiprocessors a split step leaves to transfers, 0: nobody is limited; green_context}."""
    overlap, on_gpu = config.overlap, config.device != "cpu"
    comm = comm_share(overlap.comm_sms, _traits(config)["max_sms"], config.parallel.max_nccl_ctas) if on_gpu else 0
    return {"comm": comm, "green_context": overlap.use_green_context}


def _backends(config: EngineConfig, memory: dict[str, Any]) -> dict[str, dict[str, str]]:
    """{attention, experts: {name, why}}: what would run; where that is for a GPU to tell, what it must have."""
    attention, experts = config.attention_backend, memory["experts"]
    found = {"attention": {"name": attention, "why": ""}, "experts": {"name": experts or config.moe_backend, "why": ""}}
    if attention == "auto":
        why = without_kernels(HeadShapes.of(config.model), getattr(torch, config.dtype))
        if why is None:
            least = ".".join(map(str, MIN_CAPABILITY))
            need = f"if it is installed and the GPU has compute capability {least} or newer, else sdpa"
            found["attention"] = {"name": ATTENTION_ORDER[0], "why": need}
        else:
            found["attention"] = {"name": "sdpa", "why": f"{ATTENTION_ORDER[0]}: {why}"}
    if config.moe_backend == "auto":
        first, *others = EXPERTS_ORDER[config.device]
        why = f"the first of {', '.join((first, *others))} that runs {'here' if experts else 'there'}"
        in_fp8 = "; deep_gemm where they are held in fp8" if memory["weights_fp8_bytes"] else ""
        found["experts"] = {"name": experts or first, "why": f"{why}{in_fp8}"}
    return found


def _uncapturable(config: EngineConfig, backends: dict[str, dict[str, str]]) -> list[str]:
    """Of what would run: what no graph can hold."""
    transport = config.parallel.all2all_backend
    parts = {
        f"transport {transport}": transport_class(transport).captures,
        "attention backend sdpa": backends["attention"]["name"] != "sdpa" or SdpaAttention.captures,
    }
    experts = backends["experts"]["name"]
    if experts in CPU_EXPERTS:  # the others are for GPUs, and made to be captured
        parts[f"experts backend {experts}"] = experts_class(experts).captures
    return [name for name, captures in parts.items() if not captures]


def _chosen_by_ranks(config: EngineConfig, backends: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """Rows as `resolved_options` gives them, of what the configuration leaves to the ranks."""
    open_ones = {"attention_backend": "attention", "moe_backend": "experts"}
    return [
        {"option": name, "given": "auto", "became": backends[kind]["name"], "why": backends[kind]["why"]}
        for name, kind in open_ones.items()
        if getattr(config, name) == "auto"
    ]
