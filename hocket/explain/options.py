"""What became of the user's options: which were resolved, changed, without effect or refused, and why.

Compares `Options` with the `EngineConfig` that came of them. Torch-free: what only a rank can choose, others add.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace
from typing import Any

from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.envs import DBO_COMM_SMS, FORCE_SPLIT
from hocket.errors import BackendUnavailable, ConfigError

BECAME = {
    "dtype": "dtype",
    "seed": "seed",
    "load_format": "load_format",
    "max_model_len": "scheduler.max_model_len",
    "data_parallel_size": "parallel.data_parallel_size",
    "enable_expert_parallel": "parallel.enable_expert_parallel",
    "all2all_backend": "parallel.all2all_backend",
    "expert_placement_strategy": "parallel.expert_placement_strategy",
    "max_nccl_ctas": "parallel.max_nccl_ctas",
    "ubatch_size": "overlap.num_ubatches",
    "dbo_decode_token_threshold": "overlap.decode_token_threshold",
    "dbo_prefill_token_threshold": "overlap.prefill_token_threshold",
    "ubatch_cut": "overlap.cut",
    "ubatch_executor": "overlap.executor",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler.enable_chunked_prefill",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "prefill_interval": "scheduler.prefill_interval",
    "async_scheduling": "async_scheduling",
    "block_size": "cache.block_size",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "gpu_memory_utilization": "cache.memory_utilization",
    "kv_cache_memory_bytes": "cache.memory_bytes",
    "device": "device",
    "attention_backend": "attention_backend",
    "moe_backend": "moe_backend",
    "deterministic": "deterministic",
    "cudagraph_capture_sizes": "graphs.sizes",
    "startup_timeout": "startup_timeout_s",
    "capture_timeout": "graphs.capture_timeout_s",
    "step_timeout": "step_timeout_s",
}
"""Where an option's value is found in the configuration."""
NOT_KEPT = {
    "model": "a path",
    "tokenizer": "of the front",
    "chat_template": "of the front",
    "skip_tokenizer_init": "of the front",
    "trust_remote_code": "without effect",
    "tensor_parallel_size": "1, or refused",
    "pipeline_parallel_size": "1, or refused",
    "enable_dbo": "shown by ubatch_size",
    "split_graphs": "shown by the graphs",
    "emulate_link_gb_per_s": "kept, or refused",
    "emulate_link_latency_us": "kept, or refused",
    "emulate_link_token_bytes": "kept, or refused",
    "enforce_eager": "shown by cudagraph_capture_sizes",
    "max_cudagraph_capture_size": "shown by cudagraph_capture_sizes",
}
"""Options that the configuration has no value of its own for."""
Why = Callable[[Options, EngineConfig], str]


def _why_graphs(options: Options, config: EngineConfig) -> str:
    if config.device == "cpu":
        return "a CPU has no CUDA graphs"
    if options.enforce_eager:
        return "enforce_eager"
    asked = options.cudagraph_capture_sizes is not None
    return f"none above max_num_seqs ({config.scheduler.max_num_seqs})" if asked else "by rule, up to the largest"


def _why_ubatches(options: Options, config: EngineConfig) -> str:
    return f"{FORCE_SPLIT.name} is set" if config.overlap.force_split else "two with enable_dbo"


def _why_transport(options: Options, config: EngineConfig) -> str:
    parallel, top_k = config.parallel, config.model.moe.top_k
    if not parallel.enable_expert_parallel:
        return "each rank has all experts, so nothing moves"
    others = parallel.data_parallel_size - 1
    few = "no more than" if others <= top_k else "more than"
    return f"a token has {others} other rank{'s' * (others > 1)}, {few} the experts it chooses ({top_k})"


def _why_max_tokens(options: Options, config: EngineConfig) -> str:
    whole = "" if options.enable_chunked_prefill else " and, as prompts are not chunked, max_model_len"
    return f"the default; at least max_num_seqs{whole}"


def _why_dtype(options: Options, config: EngineConfig) -> str:
    return "on a CPU" if config.device == "cpu" else "as config.json says"


def _why_device(options: Options, config: EngineConfig) -> str:
    return "there is no NVIDIA GPU here" if config.device == "cpu" else "there are NVIDIA GPUs here"


def _why_async(options: Options, config: EngineConfig) -> str:
    return "on a CPU a step leaves nothing to wait for" if config.device == "cpu" else "keeps the GPUs busy"


def _why_block(options: Options, config: EngineConfig) -> str:
    latent = config.model.mla is not None and config.device != "cpu"
    return "what kernels for latent attention read at once" if latent else "the default"


def _why_backend(options: Options, config: EngineConfig) -> str:
    return "deterministic: it is batch-invariant" if config.deterministic else f"the default on {config.device}"


WHY: dict[str, Why] = {
    "dtype": _why_dtype,
    "max_model_len": lambda options, config: "what config.json allows",
    "enable_expert_parallel": lambda options, config: "one rank has nobody to share experts with",
    "all2all_backend": _why_transport,
    "max_nccl_ctas": lambda options, config: f"what split steps leave to transfers ({DBO_COMM_SMS.name})",
    "ubatch_size": _why_ubatches,
    "ubatch_executor": lambda options, config: "the cheaper one by hocket bench handover",
    "max_num_seqs": lambda options, config: "the default; at most max_num_batched_tokens",
    "max_num_batched_tokens": _why_max_tokens,
    "async_scheduling": _why_async,
    "block_size": _why_block,
    "device": _why_device,
    "attention_backend": _why_backend,
    "moe_backend": _why_backend,
    "cudagraph_capture_sizes": _why_graphs,
}
"""Of the options that may become another value: why they did."""


def resolved_options(options: Options, config: EngineConfig) -> list[dict[str, Any]]:
    """{option, given, became, why} of each that became another value, in the order of the options, then of those that
    were given and have no effect (became None). given None: not given, the engine chooses."""
    found = []
    for name, path in BECAME.items():
        given: Any = getattr(options, name)
        became: Any = functools.reduce(getattr, path.split("."), config)
        if path.startswith("overlap.") and config.overlap.num_ubatches == 1:
            continue
        if name == "cudagraph_capture_sizes":
            became = ",".join(map(str, became)) or "none"
        if became not in (given, "auto"):
            found.append({"option": name, "given": given, "became": became, "why": WHY[name](options, config)})
    without = _without_effect(options, config)
    return [*found, *({"option": n, "given": getattr(options, n), "became": None, "why": why} for n, why in without)]


def _without_effect(options: Options, config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Options that were given, although nothing comes of them, and why."""
    overlap = [name for name, path in BECAME.items() if path.startswith("overlap.") and name != "ubatch_size"]
    thresholds = [name for name in overlap if name.startswith("dbo_")]
    off_cpu = [
        "max_nccl_ctas",
        "split_graphs",
        "enforce_eager",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "capture_timeout",
    ]
    causes = [
        (config.overlap.num_ubatches == 1, overlap, "overlap is off"),
        (config.overlap.force_split, thresholds, f"{FORCE_SPLIT.name} splits every step"),
        (config.device == "cpu", off_cpu, "on a CPU"),
        (config.device != "cpu" and config.overlap.num_ubatches == 1, ["split_graphs"], "overlap is off"),
        (not config.parallel.enable_expert_parallel, ["expert_placement_strategy"], "each rank has all experts"),
        (config.cache.memory_bytes is not None, ["gpu_memory_utilization"], "kv_cache_memory_bytes says how much"),
        (True, ["trust_remote_code"], "no model's code is ever run"),
    ]
    default = {option.name: option.default for option in fields(Options)}
    for applies, names, why in causes:
        for name in names if applies else ():
            if getattr(options, name) != default[name]:
                yield name, why


_KINDS = {
    "attention backend": "attention_backend",
    "experts backend": "moe_backend",
    "all2all backend": "all2all_backend",
}


def resolve_what_can_be(
    options: Options, gpus: int | None
) -> tuple[Options, EngineConfig, list[tuple[str, Any, ConfigError | BackendUnavailable]]]:
    """The options without those that are refused, what they ask for, and (option, value, error) of the refused ones in
    the order in which they are found: each time as if those before had not been given. gpus: see `resolve`.

    Raises:
        ConfigError, BackendUnavailable: an option is refused that was not given, or an environment variable.
        CheckpointError: as `resolve` does.
    """
    known: dict[str, Field[Any]] = {option.name: option for option in fields(Options)}
    refused: list[tuple[str, Any, ConfigError | BackendUnavailable]] = []
    while True:
        try:
            return options, resolve(options, gpus), refused
        except (ConfigError, BackendUnavailable) as error:
            name = error.field if isinstance(error, ConfigError) else _KINDS.get(error.kind, "")
            if name not in known or getattr(options, name) == known[name].default:
                raise refused[0][2] if refused else error from None
            refused.append((name, getattr(options, name), error))
            without: dict[str, Any] = {name: known[name].default}
            options = replace(options, **without)
