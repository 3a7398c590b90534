"""Compute that need not wait for a transfer in flight: later on the caller's own queue, or beside it on another stream
of the GPU. Knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Side:
    """No stream of its own: what is begun is computed when its result is asked for."""

    def begin(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Compute may start now; the function returned gives its result. It must be called, on the same stream."""
        return compute


class SideStream(Side):
    """A second stream. Pays where launches cost nothing and kernels leave room beside them: in captured decodes.

    Memory of results goes back to the second stream when they are dropped. What takes it next runs behind a `begin`,
    which waits for whatever the caller's stream still read there.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, compute: Callable[[], T]) -> Callable[[], T]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = compute()

        def wait() -> T:
            torch.cuda.current_stream().wait_stream(self._stream)
            return result

        return wait


INLINE = Side()
