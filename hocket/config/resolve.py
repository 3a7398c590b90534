"""Turns the user's options into an engine's configuration: every "auto" that needs no torch becomes a value here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hocket.config.backends import (
    ATTENTION,
    EP_TRANSPORTS,
    EXPERTS,
    GPU_ATTENTION,
    GPU_EXPERTS,
    GPU_TRANSPORTS,
    NCCL_TRANSPORTS,
    TRANSPORTS,
    check_device,
    check_invariant,
)
from hocket.config.devices import num_gpus
from hocket.config.engine import (
    CacheConfig,
    EngineConfig,
    OverlapConfig,
    ParallelConfig,
    SchedulerConfig,
)
from hocket.config.graphs import LARGEST, GraphConfig, asked_sizes, captured_sizes
from hocket.config.link import ALONE, emulated_link
from hocket.config.model import ModelConfig
from hocket.config.options import MAX_NCCL_CTAS, Options
from hocket.envs import DBO_COMM_SMS, DBO_GREEN_CONTEXT, FORCE_SPLIT
from hocket.errors import ConfigError

DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_SEQS = 256
DEFAULT_BLOCK = 16
LATENT_GPU_BLOCK = 64
Why = dict[str, str]
"""By option: why it became the value that it has, of those that need not keep the value they were given."""


def model_folder(name: str) -> Path:
    """The folder of a model: a path, or for "tiny" the model that ships with Hocket ("./tiny" is a path)."""
    if name == "tiny":
        return Path(__file__).resolve().parent.parent / "assets" / "tiny"
    return Path(name).expanduser()


def resolve(options: Options, gpus: int | None = None, num_local: int | None = None) -> EngineConfig:
    """The configuration that `options` ask for. gpus: of the host that it is for; None: of this one. num_local: ranks
    of that host, where others have the rest.

    Raises:
        ConfigError: options contradict each other or the model; the message names field, value and what is allowed.
        CheckpointError: the model's folder or its config.json cannot be read.
        BackendUnavailable: a backend that cannot run on the device, or is not batch-invariant where that is asked for.
    """
    return resolve_and_say(options, gpus, num_local)[0]


def resolve_and_say(
    options: Options, gpus: int | None = None, num_local: int | None = None
) -> tuple[EngineConfig, Why]:
    """As `resolve`, and why: said where it is decided."""
    why = Why()
    folder = model_folder(options.model)
    model = ModelConfig.from_pretrained(folder)
    _refuse_unsupported(options)
    device = _device(options, num_gpus() if gpus is None else gpus, num_local, why)
    parallel = _parallel(options, model.moe.top_k, why)
    scheduler = _scheduler(options, model, why)
    attention, experts = _backends(options, model, parallel.all2all_backend, device, why)
    overlap = _overlap(options, why)
    config = EngineConfig(
        model_path=str(folder),
        model=model,
        dtype=_dtype(options, model, device, why),
        device=device,
        load_format=options.load_format,
        seed=options.seed,
        attention_backend=attention,
        moe_backend=experts,
        deterministic=options.deterministic,
        parallel=replace(parallel, max_nccl_ctas=_nccl_ctas(parallel, overlap, device, why)),
        async_scheduling=_async_scheduling(options, device, why),
        scheduler=scheduler,
        cache=CacheConfig(
            block_size=options.block_size or _block_size(model, device, why),
            enable_prefix_caching=options.enable_prefix_caching,
            memory_utilization=options.gpu_memory_utilization,
            memory_bytes=options.kv_cache_memory_bytes,
        ),
        overlap=overlap,
        graphs=_graphs(options, device, scheduler.max_num_seqs, overlap, why),
        startup_timeout_s=options.startup_timeout,
        step_timeout_s=options.step_timeout,
        tokenizer_path="" if options.skip_tokenizer_init else options.tokenizer or str(folder),
    )
    return config, why


def _refuse_unsupported(options: Options) -> None:
    for field in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(options, field)
        if size > 1:
            raise ConfigError(field, size, "1 (for more devices: data_parallel_size with enable_expert_parallel)")


def _block_size(model: ModelConfig, device: str, why: Why) -> int:
    is_latent = model.mla is not None and device != "cpu"
    why["block_size"] = "what kernels for latent attention read at once" if is_latent else "the default"
    return LATENT_GPU_BLOCK if is_latent else DEFAULT_BLOCK


def _async_scheduling(options: Options, device: str, why: Why) -> bool:
    if options.async_scheduling is not None:
        return options.async_scheduling
    pays = device != "cpu"
    why["async_scheduling"] = "keeps the GPUs busy" if pays else "on a CPU a step leaves nothing to wait for"
    return pays


def _device(options: Options, found: int, num_local: int | None, why: Why) -> str:
    """The device, with enough of the `found` GPUs for the ranks of the host, and nothing asked of it that it cannot do
    yet."""
    device = options.device
    if device == "auto":
        device = "cuda" if found else "cpu"
        why["device"] = "there are NVIDIA GPUs here" if found else "there is no NVIDIA GPU here"
    if device == "cpu":
        return device
    if found == 0:
        raise ConfigError("device", "cuda", "cpu (there is no NVIDIA GPU here, or the installed torch has no CUDA)")
    field = "data_parallel_size" if num_local is None else "data_parallel_size_local"
    needed = options.data_parallel_size if num_local is None else num_local
    if needed > found and not _several_hosts():
        raise ConfigError(field, needed, f"at most {found}, the GPUs of this host (or device cpu)")
    if options.deterministic:
        where = "on cuda, where no backend is batch-invariant"
        raise ConfigError("deterministic", True, "false, or device cpu", where=where)
    return device


def _several_hosts() -> bool:
    """Whether torchrun's ranks are on more hosts than this one."""
    return os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")


def _dtype(options: Options, model: ModelConfig, device: str, why: Why) -> str:
    """Of weights and activations, and so of the KV cache."""
    found = _weights_dtype(options, model, device, why)
    if options.kv_cache_dtype not in ("auto", found):
        raise ConfigError("kv_cache_dtype", options.kv_cache_dtype, f"auto or {found}", where="with this dtype")
    why["kv_cache_dtype"] = "the model's, as for all that attention computes"
    return found


def _weights_dtype(options: Options, model: ModelConfig, device: str, why: Why) -> str:
    if options.dtype != "auto":
        return options.dtype
    why["dtype"] = "on a CPU" if device == "cpu" else "as config.json says"
    return "float32" if device == "cpu" else model.dtype


def _backends(options: Options, model: ModelConfig, transport: str, device: str, why: Why) -> tuple[str, str]:
    """Names of the attention and experts backends; they stay "auto" where only a rank can choose."""
    attention, experts = options.attention_backend, options.moe_backend
    check_device("attention backend", attention, device, GPU_ATTENTION, ATTENTION)
    check_device("experts backend", experts, device, GPU_EXPERTS, EXPERTS)
    check_device("all2all backend", transport, device, GPU_TRANSPORTS, EP_TRANSPORTS)
    if not options.deterministic:
        why["attention_backend"] = f"the default on {device}"
        return ("sdpa" if attention == "auto" and device == "cpu" else attention), experts
    if model.num_heads < 2:  # one task alone is computed by all threads, two by one each
        raise ConfigError("deterministic", True, "false", where="for a model of one attention head")
    check_invariant("all2all backend", transport, TRANSPORTS)
    why["attention_backend"] = why["moe_backend"] = "deterministic: it is batch-invariant"
    return (
        check_invariant("attention backend", "tiled" if attention == "auto" else attention, ATTENTION),
        check_invariant("experts backend", "tiled" if experts == "auto" else experts, EXPERTS),
    )


def _parallel(options: Options, top_k: int, why: Why) -> ParallelConfig:
    shared = options.enable_expert_parallel and options.data_parallel_size > 1
    if not shared:
        if options.all2all_backend != "auto":
            raise ConfigError("all2all_backend", options.all2all_backend, "auto", where=ALONE)
        backend = "local"
        why["enable_expert_parallel"] = "one rank has nobody to share experts with"
        why["all2all_backend"] = "each rank has all experts, so nothing moves"
    else:
        backend = options.all2all_backend
        if backend == "auto":
            backend = _transport(options.data_parallel_size - 1, top_k, why)
    return ParallelConfig(
        data_parallel_size=options.data_parallel_size,
        enable_expert_parallel=shared,
        all2all_backend=backend,
        expert_placement_strategy=options.expert_placement_strategy,
        emulated_link=emulated_link(options, shared),
        max_nccl_ctas=options.max_nccl_ctas,
    )


def _transport(others: int, top_k: int, why: Why) -> str:
    """A token goes to all other ranks or, by all-to-all, to at most top_k of them for one more round trip."""
    are_few = others <= top_k
    many = "no more than" if are_few else "more than"
    why["all2all_backend"] = (
        f"a token has {others} other rank{'s' * (others > 1)}, {many} the experts it chooses ({top_k})"
    )
    return "allgather_reducescatter" if are_few else "torch"


def _nccl_ctas(parallel: ParallelConfig, overlap: OverlapConfig, device: str, why: Why) -> int | None:
    """A group's share is fixed when it is made: with overlap it is what split steps leave to it, if none was given."""
    moves_by_nccl = device != "cpu" and parallel.all2all_backend in NCCL_TRANSPORTS
    if parallel.max_nccl_ctas is not None or overlap.num_ubatches == 1 or not moves_by_nccl or overlap.comm_sms == 0:
        return parallel.max_nccl_ctas
    why["max_nccl_ctas"] = f"what split steps leave to transfers ({DBO_COMM_SMS.name})"
    return min(overlap.comm_sms, MAX_NCCL_CTAS)


def _overlap(options: Options, why: Why) -> OverlapConfig:
    """How steps are split; asking for it where it cannot be is an error, never silently ignored."""
    if options.enable_dbo and options.ubatch_size not in (0, 2):
        raise ConfigError("ubatch_size", options.ubatch_size, "0 or 2", where="with enable_dbo")
    forced = FORCE_SPLIT.get_int(0)
    asked = 2 if options.enable_dbo else max(1, options.ubatch_size)
    num_ubatches = forced if forced > 1 else asked
    why["ubatch_size"] = f"{FORCE_SPLIT.name} is set" if forced > 1 else "two with enable_dbo"
    if asked > 1 and not (options.enable_expert_parallel and options.data_parallel_size > 1):
        field = "enable_dbo" if options.enable_dbo else "ubatch_size"
        raise ConfigError(field, getattr(options, field), "off", where=ALONE)
    if num_ubatches > 1:
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            if getattr(options, name) < num_ubatches and forced < 2:
                raise ConfigError(name, getattr(options, name), f"at least {num_ubatches}, the number of ubatches")
    # `hocket bench handover`: 0.5 to 1 µs with greenlets, 10 to 40 µs with threads; a step makes four per sparse layer.
    why["ubatch_executor"] = "the cheaper one by hocket bench handover"
    executor = "greenlet" if options.ubatch_executor == "auto" else options.ubatch_executor
    return OverlapConfig(
        num_ubatches=num_ubatches,
        decode_token_threshold=options.dbo_decode_token_threshold,
        prefill_token_threshold=options.dbo_prefill_token_threshold,
        force_split=forced > 1,
        cut=options.ubatch_cut,
        executor=executor,
        comm_sms=DBO_COMM_SMS.get_int(0),
        use_green_context=DBO_GREEN_CONTEXT.get_one_of("0", "1") == "1",
    )


def _graphs(options: Options, device: str, max_num_seqs: int, overlap: OverlapConfig, why: Why) -> GraphConfig:
    """Sizes as asked for, or by rule; none on a CPU. Split ones where a step of so many tokens could be split."""
    if options.cudagraph_capture_sizes is not None:
        if (most := options.max_cudagraph_capture_size) is not None:
            raise ConfigError("max_cudagraph_capture_size", most, "nothing", where="with cudagraph_capture_sizes")
        sizes = asked_sizes(options.cudagraph_capture_sizes, max_num_seqs)
        reason = f"none above max_num_seqs ({max_num_seqs})"
    else:
        sizes = captured_sizes(min(options.max_cudagraph_capture_size or LARGEST, max_num_seqs))
        reason = "by rule, up to the largest"
    if device == "cpu" or options.enforce_eager:
        sizes = ()
        reason = "a CPU has no CUDA graphs" if device == "cpu" else "enforce_eager"
    why["cudagraph_capture_sizes"] = reason
    split_sizes: tuple[int, ...] = ()
    if overlap.num_ubatches > 1 and options.split_graphs:
        least = overlap.num_ubatches if overlap.force_split else overlap.decode_token_threshold
        split_sizes = tuple(size for size in sizes if size >= least)
    return GraphConfig(sizes=sizes, split_sizes=split_sizes, capture_timeout_s=options.capture_timeout)


def _scheduler(options: Options, model: ModelConfig, why: Why) -> SchedulerConfig:
    why["max_model_len"] = "what config.json allows"
    why["max_num_seqs"] = "the default; at most max_num_batched_tokens"
    max_len = options.max_model_len or model.max_position_embeddings
    if max_len > model.longest_context:
        extended = model.longest_context > model.max_position_embeddings
        what = "as far as its YaRN scaling reaches" if extended else "the model's max_position_embeddings"
        raise ConfigError("max_model_len", max_len, f"at most {model.longest_context} ({what})")
    tokens = options.max_num_batched_tokens
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS, options.max_num_seqs or 0)
        tokens = tokens if options.enable_chunked_prefill else max(tokens, max_len)
        whole = "" if options.enable_chunked_prefill else " and, as prompts are not chunked, max_model_len"
        why["max_num_batched_tokens"] = f"the default; at least max_num_seqs{whole}"
    seqs = options.max_num_seqs or min(DEFAULT_SEQS, tokens)
    if not options.enable_chunked_prefill and tokens < max_len:
        allowed = f"at least max_model_len ({max_len})"
        raise ConfigError("max_num_batched_tokens", tokens, allowed, where="without chunked prefill")
    if tokens < seqs:
        raise ConfigError("max_num_batched_tokens", tokens, f"at least max_num_seqs ({seqs})")
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        prefill_interval=options.prefill_interval,
    )
