"""Launches of Triton kernels that repeat: what Triton works out at every call is worked out once. Knows no kernel.

Triton binds, checks and hashes all arguments of a launch and asks the driver about every pointer, which takes longer
than many kernels run. A `Launch` keeps the compiled kernel and gives it addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from hocket.envs import KEEP_KERNELS

TRITON = "3.6."
"""Versions whose compiled kernels are launched as here; with another one all launches are Triton's own."""
launches = lru_cache(maxsize=4096)
"""Decorates a function from shapes, strides and the like to the Launch for them."""
_Compiled = tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]
"""What launches a compiled kernel; the grid; the kernel as Triton knows it; the arguments behind those of a call."""
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
_UNALIGNED = 15
"""Bits of an address that are 0 where the kernel compiled for aligned memory may be used: Triton compiles another one
for addresses that are no multiple of 16."""


@cache
def keeps_kernels() -> bool:
    """Whether repeated launches skip Triton's own work."""
    version = getattr(sys.modules.get("triton"), "__version__", TRITON)
    return KEEP_KERNELS.get_int(0) != 0 and str(version).startswith(TRITON)


class Launch:
    """A kernel with its grid, numbers and constants. Calls differ in their tensors alone.

    The kernel's parameters, in order: the tensors, integers that change and are not specialised, `numbers`, constants.
    `constants` may hold options of Triton too (num_warps).
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_known", "_numbers")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._constants = constants
        self._known: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(self, first: Tensor, *others: Tensor | None, changing: tuple[int, ...] = ()) -> None:
        """Launch it on the current stream of the device."""
        if not keeps_kernels():
            self.by_triton(first, *others, *changing)
            return
        device, bits = first.get_device(), first.data_ptr()
        addresses, key = [bits], [device, first.dtype]
        for x in others:
            if x is None:
                addresses.append(0)
                key.append(None)
            else:
                address = x.data_ptr()
                bits |= address
                addresses.append(address)
                key.append(x.dtype)
        kind = tuple(key)
        found = self._known.get(kind)
        if found is None or bits & _UNALIGNED:
            compiled = self.by_triton(first, *others, *changing)
            if compiled is not None and not bits & _UNALIGNED:
                self._known[kind] = self._prepared(compiled, len(addresses) + len(changing))
        else:
            run, grid, handle, rest = found
            run(*grid, _stream_of(device), *handle, *addresses, *changing, *rest)

    def by_triton(self, *args: Any) -> Any:
        """The same as Triton does it, tensor descriptors too: the compiled kernel, None in its interpreter."""
        return self._kernel[self._grid](*args, *self._numbers, **self._constants)

    def _prepared(self, compiled: Any, num_before: int) -> _Compiled:
        names = self._kernel.arg_names[num_before + len(self._numbers) :]
        rest = (*self._numbers, *(self._constants[name] for name in names))
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        told = metadata, None, None, None  # of the launch, and who is told of it before and after it
        handle: tuple[Any, ...] = function, *told
        if getattr(run, "global_scratch_size", 1) == getattr(run, "profile_scratch_size", 1) == 0:
            # Triton's launcher would look for memory that this kernel does not need, which takes as long again.
            handle = function, run.launch_cooperative_grid, run.launch_pdl, None, None, *told
            run = run.launch
        return run, (*self._grid, 1, 1)[:3], handle, rest
