"""What a GPU ran when, from a profile's kernels: communication, and the part of it that no compute ran beside.

A pure function of intervals; knows no profiler and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.trace.figures import Interval, common, length, union

COMM_NAMES = ("nccl", "deep_ep", "nvshmem", "put_signal", "wait_signal", "memcpy ptop")
"""Parts of the names of kernels that move tokens or signals between GPUs, and of copies that do."""
COPIES = ("Memcpy", "Memset")
FROM_HOST = "Memcpy HtoD"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a kernel, or a copy, on a stream, in ns of any one clock."""

    name: str
    stream: int
    start_ns: int
    stop_ns: int

    @property
    def is_comm(self) -> bool:
        name = self.name.lower()
        return any(part in name for part in COMM_NAMES)

    @property
    def is_copy(self) -> bool:
        return self.name.startswith(COPIES)


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Of one GPU, each moment counted once. comm_ns: a kernel of communication ran. compute_ns: another one did.
    exposed_ns: the first, without the second. busy_ns: either. wall_ns: from the first start to the last end."""

    comm_ns: int
    compute_ns: int
    exposed_ns: int
    busy_ns: int
    wall_ns: int

    @property
    def hidden_share(self) -> float:
        """Of communication, what ran beside compute; 1 where there is none."""
        return 1 - self.exposed_ns / self.comm_ns if self.comm_ns else 1.0


def gpu_figures(kernels: Iterable[Kernel]) -> GpuFigures:
    """The figures of all `kernels` of one GPU."""
    kernels = list(kernels)
    comm, compute = lanes_of(kernels)
    comm_ns, hidden_ns = length(comm), length(common(comm, compute))
    return GpuFigures(
        comm_ns=comm_ns,
        compute_ns=length(compute),
        exposed_ns=comm_ns - hidden_ns,
        busy_ns=length(union([*comm, *compute])),
        wall_ns=max((k.stop_ns for k in kernels), default=0) - min((k.start_ns for k in kernels), default=0),
    )


def lanes_of(kernels: Sequence[Kernel]) -> tuple[list[Interval], list[Interval]]:
    """When communication ran and when compute did, each disjoint and in order."""
    comm, compute = told_apart(kernels)
    return union((k.start_ns, k.stop_ns) for k in comm), union((k.start_ns, k.stop_ns) for k in compute)


def told_apart(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Those of communication and those of compute, in their order.

    Kernels are told by their names, as an unsplit step has both on one stream. A copy is communication where its stream
    runs nothing else, one from the host (an emulated link, `moe/transport/link_copies.py`) where it runs no compute.
    """
    computing = {kernel.stream for kernel in kernels if not kernel.is_comm and not kernel.is_copy}
    moving = {one.stream for one in kernels if one.is_comm or one.name.startswith(FROM_HOST)} - computing
    comm: list[Kernel] = []
    compute: list[Kernel] = []
    for kernel in kernels:
        lane = comm if kernel.is_comm or (kernel.is_copy and kernel.stream in moving) else compute
        lane.append(kernel)
    return comm, compute
