"""DeepEP as it may be installed: whether it loads, what its kernels were made for, how it numbers experts and what its
NVSHMEM must be told. Knows no transfers.

Limits are those of the kernels in tokenspeed-deepep 1.2.1.post20251110, which checks them with assertions or not at
all.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hocket.config.backends import NCCL_TRANSPORTS
from hocket.errors import BackendUnavailable, CapacityError, ConfigError
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import StepSizes

PACKAGE = "tokenspeed-deepep==1.2.1.post20251110"
_NVSHMEM = "libnvshmem_host.so.3"
HIGH_THROUGHPUT_RANKS = (2, 4, 8)
HIGH_THROUGHPUT_MAX_WIDTH = 7936
"""A warp's shared memory holds half a row of bf16 and 8 bytes more: under 8192."""
HIGH_THROUGHPUT_WIDTH_MULTIPLE = 256
"""A warp reads 16 bytes a lane."""
HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS = 128
HIGH_THROUGHPUT_MAX_TOP_K = 32
LOW_LATENCY_MAX_RANKS = 8
"""Of one host: its NVSHMEM is set up without a network."""
LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_MAX_TOP_K = 11
DEFAULT_QUEUE_DEPTH = 1024


def load(name: str) -> Any:
    """The module deep_ep, for the transport `name`. Raises BackendUnavailable with the package to install."""
    try:
        try:
            return importlib.import_module("deep_ep")
        except ImportError as error:
            if _NVSHMEM not in str(error) or not _load_nvshmem():
                raise
            return importlib.import_module("deep_ep")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        why = f"it needs {PACKAGE} ({type(error).__name__}: {' '.join(str(error).split())})"
        raise BackendUnavailable("all2all backend", name, why, NCCL_TRANSPORTS) from error


def _load_nvshmem() -> bool:
    """DeepEP's own search path is that of the machine it was built on: load the library that torch brings along."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder, "nvshmem", "lib", _NVSHMEM)
        if file.exists():
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def unavailable_reason(name: str, device_type: str) -> str | None:
    """Why the transport `name` cannot run on such a device here; None: it can."""
    if device_type != "cuda":
        return "it runs on NVIDIA GPUs only"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        return "its kernels are for Hopper GPUs (compute capability 9) and newer"
    try:
        load(name)
    except BackendUnavailable as error:
        return error.why
    return None


@dataclass(frozen=True)
class Numbering:
    """DeepEP gives every rank the same count of experts, a rank's behind those of the one before. Where ranks have
    different counts, the last numbers of some stand for no expert."""

    placement: ExpertPlacement

    @cached_property
    def per_rank(self) -> int:
        return max(len(self.placement.experts_of(rank)) for rank in range(self.placement.num_ranks))

    @property
    def num_experts(self) -> int:
        return self.per_rank * self.placement.num_ranks

    def number_of(self) -> tuple[int, ...]:
        """[E + 1] the number of each expert; -1 at the end, which an id of -1 reads."""
        placement = self.placement
        placed = zip(placement.rank_of, placement.local_idx, strict=True)
        return *(rank * self.per_rank + index for rank, index in placed), -1

    def ids_of(self, rank: int) -> tuple[int, ...]:
        """[per_rank + 1] the id of each of a rank's experts; -1 where there is none, and at the end."""
        ids = self.placement.experts_of(rank)
        return *ids, *([-1] * (self.per_rank + 1 - len(ids)))

    def to_numbers(self, device: torch.device) -> torch.Tensor | None:
        """`number_of` as int64; None where ids are numbers."""
        numbers = self.number_of()
        is_same = numbers == (*range(self.placement.num_experts), -1)
        return None if is_same else torch.tensor(numbers, device=device)


def check_high_throughput(sizes: StepSizes, numbering: Numbering) -> None:
    """Raise ConfigError for what its kernels do not take."""
    num_ranks = numbering.placement.num_ranks
    _check_host(sizes, num_ranks)
    where = "with all2all_backend deepep_high_throughput"
    if num_ranks not in HIGH_THROUGHPUT_RANKS:
        allowed = f"one of {', '.join(map(str, HIGH_THROUGHPUT_RANKS))}"
        raise ConfigError("data_parallel_size", num_ranks, allowed, where=where)
    if sizes.dtype != torch.bfloat16:
        raise ConfigError("dtype", str(sizes.dtype), "bfloat16", where=where)
    if sizes.hidden_size % HIGH_THROUGHPUT_WIDTH_MULTIPLE or sizes.hidden_size > HIGH_THROUGHPUT_MAX_WIDTH:
        allowed = f"a multiple of {HIGH_THROUGHPUT_WIDTH_MULTIPLE} up to {HIGH_THROUGHPUT_MAX_WIDTH}"
        raise ConfigError("hidden_size", sizes.hidden_size, allowed, where=where)
    if numbering.per_rank > HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS:
        allowed = f"so many that none has over {HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS} experts"
        raise ConfigError("data_parallel_size", num_ranks, allowed, where=where)
    if sizes.top_k > HIGH_THROUGHPUT_MAX_TOP_K:
        raise ConfigError("num_experts_per_tok", sizes.top_k, f"at most {HIGH_THROUGHPUT_MAX_TOP_K}", where=where)


def check_low_latency(sizes: StepSizes, numbering: Numbering) -> None:
    """Raise ConfigError for what its kernels do not take."""
    num_ranks = numbering.placement.num_ranks
    _check_host(sizes, num_ranks)
    where = "with all2all_backend deepep_low_latency"
    if num_ranks > LOW_LATENCY_MAX_RANKS:
        raise ConfigError("data_parallel_size", num_ranks, f"at most {LOW_LATENCY_MAX_RANKS}", where=where)
    if sizes.dtype != torch.bfloat16:
        raise ConfigError("dtype", str(sizes.dtype), "bfloat16", where=where)
    if sizes.hidden_size not in LOW_LATENCY_WIDTHS:
        raise ConfigError("hidden_size", sizes.hidden_size, ", ".join(map(str, LOW_LATENCY_WIDTHS)), where=where)
    if sizes.top_k > LOW_LATENCY_MAX_TOP_K:
        raise ConfigError("num_experts_per_tok", sizes.top_k, f"at most {LOW_LATENCY_MAX_TOP_K}", where=where)


def _check_host(sizes: StepSizes, num_ranks: int) -> None:
    """Between hosts its kernels need a network that sends from the GPU, which was never tried."""
    if sizes.num_local_ranks != num_ranks:
        allowed = "torch or allgather_reducescatter"
        raise ConfigError("all2all_backend", "deepep", allowed, where="for ranks on several hosts")


def nvshmem_settings(max_tokens: int, found: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for NVSHMEM inside one host, in addition to those DeepEP sets; what is `found` stays, but
    for a queue that is too short.

    max_tokens: of one rank in one dispatch. DeepEP does not look whether a queue is full, so it must hold all messages
    that may be under way to a rank, and wants 2 · (max_tokens + 1) entries.
    """
    wanted = {
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_IB": "1",
        "NVSHMEM_DISABLE_NVLS": "1",  # no multicast: not every host has it
    }
    settings = {name: value for name, value in wanted.items() if name not in found}
    depth = DEFAULT_QUEUE_DEPTH
    while depth < 2 * (max_tokens + 1):
        depth *= 2
    given = found.get("NVSHMEM_QP_DEPTH", "")
    if not given.isdecimal() or int(given) < depth:
        settings["NVSHMEM_QP_DEPTH"] = str(depth)
    return settings


def set_up_nvshmem(max_tokens: int) -> None:
    """Before DeepEP starts NVSHMEM in this process."""
    os.environ.update(nvshmem_settings(max_tokens, os.environ))


def check_room(what: str, num_bytes: int, advice: str) -> None:
    """Raise CapacityError where the GPU's memory does not suffice for `what`, before the library fails in its way."""
    if not torch.cuda.is_available():
        return
    free, _ = torch.cuda.mem_get_info()
    if num_bytes > free:
        raise CapacityError(f"{what} needs {num_bytes:,} bytes, and {free:,} are free: {advice}")
