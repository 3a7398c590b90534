"""What an engine runs with, all values resolved. Knows nothing of flags, files or "auto"."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from hocket.config.graphs import GraphConfig
from hocket.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """A link that transfers are stretched to.

    token_bytes: what a dispatch and a combine are taken to carry for each of a rank's tokens; None: what is sent.
    """

    gb_per_s: float
    latency_us: float
    token_bytes: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks and how the experts are divided over them."""

    data_parallel_size: int
    enable_expert_parallel: bool
    all2all_backend: str
    expert_placement_strategy: str
    emulated_link: EmulatedLink | None = None
    max_nccl_ctas: int | None = None

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share one set of experts: all of them, or one where each rank is a replica."""
        return self.data_parallel_size if self.enable_expert_parallel else 1


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a rank's step. Counts are per rank."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    prefill_interval: int


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of a rank; `memory_bytes` None: sized from the free memory at start."""

    block_size: int
    enable_prefix_caching: bool
    memory_utilization: float
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """Dual batch overlap: into how many ubatches a step is split, and from how many tokens per rank on.

    num_ubatches 1: off. force_split: split every step, whatever the thresholds; ubatches may be empty then.
    cut: into parts of "equal" numbers of tokens, or of equal estimated "cost". comm_sms: how many multiprocessors of a
    GPU a split step leaves to transfers, at most what they can use; 0: nobody is limited. use_green_context: whether
    all compute keeps to the rest, or only the kernels that can be told.
    """

    num_ubatches: int = 1
    decode_token_threshold: int = 32
    prefill_token_threshold: int = 512
    force_split: bool = False
    cut: str = "equal"
    executor: str = "greenlet"
    comm_sms: int = 0
    use_green_context: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a rank needs to run, equal on all ranks (its digest travels in the step exchange).

    attention_backend and moe_backend may be "auto": only a rank, which has torch, can tell what runs there.
    """

    model_path: str
    model: ModelConfig
    dtype: str
    device: str
    load_format: str
    seed: int
    attention_backend: str
    moe_backend: str
    deterministic: bool
    parallel: ParallelConfig
    async_scheduling: bool
    scheduler: SchedulerConfig
    cache: CacheConfig
    overlap: OverlapConfig
    graphs: GraphConfig
    startup_timeout_s: float
    step_timeout_s: float
    tokenizer_path: str = ""
    """Where a rank finds the tokenizer, which it needs to follow JSON schemas; "": there is none."""

    @property
    def digest(self) -> int:
        """31 bits that differ whenever two ranks' configurations do."""
        raw = hashlib.blake2b(msgspec.json.encode(self), digest_size=4).digest()
        return int.from_bytes(raw, "little") & 0x7FFFFFFF
