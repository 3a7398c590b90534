"""The backends there are, and which of them are batch-invariant. Knows nothing of how they work.

Batch-invariant: a row's result depends, to the last bit, on that row and its request alone, not on what else is in the
batch, where the batch is cut or how a prompt was chunked. True says so for every dtype and device that is offered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hocket.errors import BackendUnavailable

ATTENTION = {"sdpa": False, "tiled": True, "flashinfer": False}
GPU_ATTENTION = ("flashinfer",)
CPU_ATTENTION = tuple(name for name in ATTENTION if name not in GPU_ATTENTION)
EXPERTS = {"reference": False, "grouped_mm": False, "tiled": True, "triton_grouped": False, "deep_gemm": False}
GPU_EXPERTS = ("triton_grouped", "deep_gemm")
"""Those that run on NVIDIA GPUs only."""
CPU_EXPERTS = tuple(name for name in EXPERTS if name not in GPU_EXPERTS)
TRANSPORTS = {
    "local": True,
    "torch": True,  # it and the next one add up ranks in rank order
    "allgather_reducescatter": True,
    "nvlink_copy": True,  # likewise
    "deepep_high_throughput": False,
    "deepep_low_latency": False,
}
EP_TRANSPORTS = tuple(name for name in TRANSPORTS if name != "local")
"""Those between ranks that share experts."""
NCCL_TRANSPORTS = ("torch", "allgather_reducescatter")
"""Those that NCCL moves tokens for on GPUs."""
GPU_TRANSPORTS = tuple(name for name in EP_TRANSPORTS if name not in NCCL_TRANSPORTS)
"""Those that run on NVIDIA GPUs only."""
COPY_TRANSPORTS = ("nvlink_copy",)
"""Those whose rows copy engines move: in a profile of a replayed graph such copies look like any other."""
EXECUTORS = ("greenlet", "thread")
"""How ubatches take turns."""
PLACEMENTS = ("linear", "round_robin")
"""Which rank holds which experts."""


def check_device(kind: str, name: str, device: str, gpu_only: Collection[str], backends: Collection[str]) -> str:
    """`name`, unless it needs a GPU and the device is "cpu". Raises BackendUnavailable then, with those that do not."""
    if device == "cpu" and name in gpu_only:
        others = [other for other in backends if other not in gpu_only]
        raise BackendUnavailable(kind, name, "it runs on NVIDIA GPUs only, and the device is cpu", others)
    return name


def check_invariant(kind: str, name: str, backends: Mapping[str, bool]) -> str:
    """`name`, if it is batch-invariant. Raises BackendUnavailable otherwise, with those that are."""
    if not backends[name]:
        why = "with deterministic it must be batch-invariant, and its results depend on the rest of the batch"
        raise BackendUnavailable(kind, name, why, [other for other, is_invariant in backends.items() if is_invariant])
    return name
