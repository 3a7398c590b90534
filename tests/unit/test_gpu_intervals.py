"""Communication on a GPU and what ran beside it, against an independent count over single nanoseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.trace.gpu_intervals import GpuFigures, Kernel, gpu_figures

MOVING = ("ncclDevKernel_AllGather_RING_LL", "deep_ep::internode_ll::dispatch", "wait_signal_kernel")
COPIES = {"Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)"}
NAMES = (*MOVING, "gemm", *sorted(COPIES))
kernels = st.builds(
    lambda name, stream, start, took: Kernel(name, stream, start, start + took),
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(0, 40),
    st.integers(0, 12),
)


def moments(given: list[Kernel]) -> set[int]:
    return {ns for kernel in given for ns in range(kernel.start_ns, kernel.stop_ns)}


@given(st.lists(kernels, max_size=12))
def test_every_moment_counts_once(given: list[Kernel]) -> None:
    only_comm = {
        stream for stream in (1, 2, 3) if {k.name for k in given if k.stream == stream} - COPIES <= set(MOVING)
    } & {k.stream for k in given if k.name in MOVING or "HtoD" in k.name}
    moving = [k for k in given if k.name in MOVING or (k.name in COPIES and k.stream in only_comm)]
    comm, compute = moments(moving), moments([k for k in given if k not in moving])
    assert gpu_figures(given) == GpuFigures(
        comm_ns=len(comm),
        compute_ns=len(compute),
        exposed_ns=len(comm - compute),
        busy_ns=len(comm | compute),
        wall_ns=max((k.stop_ns for k in given), default=0) - min((k.start_ns for k in given), default=0),
    )


def test_an_unsplit_step_hides_nothing_on_its_one_stream() -> None:
    step = [Kernel("gemm", 7, 0, 50), Kernel("ncclDevKernel_ReduceScatter", 7, 50, 70), Kernel("norm", 7, 70, 75)]
    found = gpu_figures(step)
    assert (found.comm_ns, found.exposed_ns, found.hidden_share) == (20, 20, 0.0)


def test_a_transfer_beside_compute_and_then_alone() -> None:
    step = [Kernel("gemm", 7, 0, 50), Kernel("put_signal_kernel", 9, 10, 12), Kernel("Memcpy HtoD", 11, 12, 90)]
    found = gpu_figures(step)
    assert (found.comm_ns, found.exposed_ns) == (80, 40)
    assert found.hidden_share == pytest.approx(0.5)
    assert gpu_figures([]).hidden_share == 1.0
