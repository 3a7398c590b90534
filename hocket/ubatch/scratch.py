"""What a layer keeps from one call to the next, once per ubatch. Knows nothing of what is kept.

While ubatches alternate, a layer is called for one of them in the midst of its call for another: an attribute or a
buffer that both write would hand one the other's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hocket.ubatch.context import current

T = TypeVar("T")


class PerUBatch(Generic[T]):
    """A value for each ubatch: a scratch buffer, or what one layer leaves to a later one of the same step.

    `make` gives a ubatch's first value, when it is first asked for; values stay until they are replaced. Without
    overlap there is one. Buffers must hold the whole batch, which runs unsplit whenever a step is not split.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    @property
    def value(self) -> T:
        """The calling ubatch's own."""
        idx = _idx()
        if idx not in self._values:
            self._values[idx] = self._make()
        return self._values[idx]

    @value.setter
    def value(self, value: T) -> None:
        self._values[_idx()] = value


def _idx() -> int:
    context = current()
    return 0 if context is None else context.idx
