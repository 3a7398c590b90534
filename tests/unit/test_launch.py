"""Repeated launches of a Triton kernel: what Triton itself is asked for, and what the compiled kernel is given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.launch import Launch, keeps_kernels

ROOM = torch.zeros(64)
ALIGNED, BESIDE = ROOM[:8], ROOM[1:9]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HOCKET_KEEP_KERNELS=1."""
    monkeypatch.setattr("hocket.launch.keeps_kernels", lambda: True)


class Kernel:
    """Notes what it is launched with, by Triton's way and compiled. Tensors a, b; `step` changes; constants B and A."""

    arg_names = ("a", "b", "step", "stride", "eps", "B", "A")

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self._is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Compiled | None:
            self.by_triton.append((grid, args, constants))
            return None if self._is_interpreted else Compiled(self)

        return launch


class Compiled:
    """As Triton's: `run` takes the grid, the stream, the kernel twice, three hooks and then all arguments."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def run(self, *args: Any) -> None:
        *grid, stream, function, metadata, said, before, after = args[:9]
        assert (stream, function, metadata) == (0, "function", "metadata")
        assert said is before is after is None
        self._kernel.compiled.append((tuple(grid), args[9:]))


class Launcher:
    """As Triton's where a kernel has sizes of memory of its own: called, it gets that; `launch` is told of it."""

    launch_cooperative_grid, launch_pdl = "cooperative", "dependent"

    def __init__(self, compiled: Compiled, global_scratch: int, profile_scratch: int) -> None:
        self._compiled = compiled
        self.global_scratch_size, self.profile_scratch_size = global_scratch, profile_scratch
        self.num_direct = 0

    def __call__(self, *args: Any) -> None:
        self._compiled.run(*args)

    def launch(self, *args: Any) -> None:
        assert args[5:9] == ("cooperative", "dependent", None, None)
        self.num_direct += 1
        self._compiled.run(*args[:5], *args[9:])


def launch_of(kernel: Kernel) -> Launch:
    return Launch(kernel, (5, 2), 24, 1e-6, A=7, B=True, num_warps=4)


def test_the_first_launch_is_tritons_and_the_next_ones_give_addresses() -> None:
    kernel = Kernel()
    launch, other = launch_of(kernel), ROOM[16:24]
    launch(ALIGNED, other, changing=(3,))
    [(grid, args, constants)] = kernel.by_triton
    assert (grid, args[2:], constants) == ((5, 2), (3, 24, 1e-6), {"A": 7, "B": True, "num_warps": 4})
    assert args[0] is ALIGNED
    assert args[1] is other
    launch(other, ALIGNED, changing=(4,))
    assert len(kernel.by_triton) == 1
    assert kernel.compiled == [((5, 2, 1), (other.data_ptr(), ALIGNED.data_ptr(), 4, 24, 1e-6, True, 7))]


@pytest.mark.parametrize("scratch", [(0, 0), (8, 0), (0, 8)])
def test_kernels_without_memory_of_their_own_are_launched_directly(scratch: tuple[int, int]) -> None:
    kernel = Kernel()
    launcher = Launcher(Compiled(kernel), *scratch)
    compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
    launch = launch_of(kernel)
    launch._known[(-1, torch.float32, torch.float32)] = launch._prepared(compiled, 3)
    launch(ALIGNED, ALIGNED, changing=(3,))
    assert kernel.compiled == [((5, 2, 1), (ALIGNED.data_ptr(), ALIGNED.data_ptr(), 3, 24, 1e-6, True, 7))]
    assert launcher.num_direct == (scratch == (0, 0))


def test_a_missing_tensor_is_a_null_pointer_and_another_kernel() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    for other in (ALIGNED, None, ALIGNED, None):
        launch(ALIGNED, other, changing=(3,))
    assert len(kernel.by_triton) == 2
    assert [args[1] for _, args in kernel.compiled] == [ALIGNED.data_ptr(), 0]


@pytest.mark.parametrize("other", [ALIGNED.double(), ALIGNED.int(), BESIDE])
def test_what_triton_compiles_another_kernel_for_is_left_to_triton(other: Tensor) -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    launch(ALIGNED, ALIGNED, changing=(3,))
    launch(ALIGNED, other, changing=(3,))
    assert len(kernel.by_triton) == 2
    assert not kernel.compiled


def test_memory_that_is_not_aligned_never_leaves_a_kernel_behind() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    for first in (BESIDE, ALIGNED, BESIDE):
        launch(first, ALIGNED, changing=(3,))
    assert len(kernel.by_triton) == 3
    assert not kernel.compiled


def test_the_interpreter_is_always_asked() -> None:
    kernel = Kernel(is_interpreted=True)
    launch = launch_of(kernel)
    for _ in range(3):
        launch(ALIGNED, ALIGNED, changing=(3,))
    assert len(kernel.by_triton) == 3


@pytest.mark.parametrize(("asked", "version"), [("0", "3.6.0"), ("1", "4.0.0")])
def test_not_unless_asked_for_and_with_a_known_triton(
    asked: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.launch.keeps_kernels", keeps_kernels)
    monkeypatch.setenv("HOCKET_KEEP_KERNELS", asked)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    keeps_kernels.cache_clear()
    kernel = Kernel()
    launch = Launch(kernel, (5, 2), 24, 1e-6, A=7, B=True)
    for _ in range(3):
        launch(ALIGNED, ALIGNED, changing=(1,))
    assert len(kernel.by_triton) == 3
    assert not kernel.compiled
    keeps_kernels.cache_clear()
