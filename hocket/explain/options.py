"""What became of the user's options: which were resolved, changed, without effect or refused, and why.

Compares `Options` with the `EngineConfig` that came of them. Torch-free: what only a rank can choose, others add.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import Field, fields, replace
from typing import Any

from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.config.resolve import Why, resolve_and_say
from hocket.envs import FORCE_SPLIT
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
    "kv_cache_dtype": "dtype",
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


def resolved_options(options: Options, config: EngineConfig, why: Why) -> list[dict[str, Any]]:
    """{option, given, became, why} of each that became another value, in the order of the options, then of those that
    were given and have no effect (became None). given None: not given, the engine chooses. why: of `resolve_and_say`.
    """
    found = []
    for name, path in BECAME.items():
        given: Any = getattr(options, name)
        became: Any = functools.reduce(getattr, path.split("."), config)
        if path.startswith("overlap.") and config.overlap.num_ubatches == 1:
            continue
        if name == "cudagraph_capture_sizes":
            became = ",".join(map(str, became)) or "none"
        if became not in (given, "auto"):
            found.append({"option": name, "given": given, "became": became, "why": why[name]})
    without = _without_effect(options, config)
    return [*found, *({"option": n, "given": getattr(options, n), "became": None, "why": said} for n, said in without)]


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
) -> tuple[Options, EngineConfig, Why, list[tuple[str, Any, ConfigError | BackendUnavailable]]]:
    """The options without those that are refused, what they ask for and why, and (option, value, error) of the refused
    ones in the order in which they are found: each time as if those before had not been given. gpus: see `resolve`.

    Raises:
        ConfigError, BackendUnavailable: an option is refused that was not given, or an environment variable.
        CheckpointError: as `resolve` does.
    """
    known: dict[str, Field[Any]] = {option.name: option for option in fields(Options)}
    refused: list[tuple[str, Any, ConfigError | BackendUnavailable]] = []
    while True:
        try:
            return options, *resolve_and_say(options, gpus), refused
        except (ConfigError, BackendUnavailable) as error:
            name = error.field if isinstance(error, ConfigError) else _KINDS.get(error.kind, "")
            if name not in known or getattr(options, name) == known[name].default:
                raise refused[0][2] if refused else error from None
            refused.append((name, getattr(options, name), error))
            without: dict[str, Any] = {name: known[name].default}
            options = replace(options, **without)
