"""Finds the first layer whose hidden states differ between two runs over the same tokens. Numpy only.

Shapes: R rows (tokens that went through the model), D hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.channel.messages import StateRow, States

PLACES = ("attention", "MLP or experts")
"""Where in a layer states are looked at, in the order of `States.values`: behind each of its two blocks."""
_TINY = 1e-30


@dataclass(frozen=True)
class LayerStates:
    """Hidden states of one layer, from all ranks. rows: what each of the R rows was. values: fp32 [places, R, D]."""

    rows: Sequence[StateRow]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, parts: Iterable[States]) -> LayerStates:
        """Of what each rank says of the layer."""
        rows, values = list[StateRow](), list[NDArray[np.float32]]()
        for part in parts:
            raw = np.frombuffer(part.values, dtype=np.float32)
            values.append(raw.reshape(len(PLACES), len(part.rows), part.hidden_size))
            rows += part.rows
        return cls(rows, np.concatenate(values, axis=1))

    def places(self) -> dict[tuple[str, int], int]:
        """(request, position) → row; where a token was computed again (after a preemption) the first time counts."""
        found: dict[tuple[str, int], int] = {}
        for idx, row in enumerate(self.rows):
            found.setdefault((row.request_id, row.position), idx)
        return found


@dataclass(frozen=True)
class StateDifference:
    """The first layer that differs, and in it the earliest row. layer: from 0. difference: ‖found − expected‖ as a
    share of ‖expected‖. ubatches: rows that differ, by ubatch."""

    layer: int
    place: str
    row: StateRow
    difference: float
    num_rows: int
    num_differing: int
    ubatches: dict[int, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        row = {name: getattr(self.row, name) for name in self.row.__struct_fields__}
        return vars(self) | {"row": row}


@dataclass(frozen=True)
class Bisection:
    """What looking at all layers gave. first None: the layers agree. num_rows: compared, of each layer. largest: the
    largest difference up to the first one that is not allowed. num_strays: most rows of a layer that differ by more
    than the tolerance, where so few may."""

    num_layers: int
    num_rows: int
    largest: float
    num_strays: int
    first: StateDifference | None


def bisect(
    expected: Sequence[LayerStates], found: Iterator[LayerStates], tolerance: float, stray: float = 0.0
) -> Bisection:
    """Layer by layer, from the first on; layers behind the first that differs are not asked for.

    tolerance: most that a row may differ, as a share of its length. stray: the share of rows that may differ more.
    """
    largest, num_rows, num_strays = 0.0, 0, 0
    for layer, (before, after) in enumerate(zip(expected, found, strict=False)):
        difference, largest_here, num_rows = _compare_layer(layer, before, after, tolerance)
        largest = max(largest, largest_here)
        if difference is not None and difference.num_differing > stray * num_rows:
            return Bisection(layer + 1, num_rows, largest, num_strays, difference)
        num_strays = max(num_strays, difference.num_differing if difference is not None else 0)
    return Bisection(len(expected), num_rows, largest, num_strays, None)


def _compare_layer(
    layer: int, expected: LayerStates, found: LayerStates, tolerance: float
) -> tuple[StateDifference | None, float, int]:
    theirs, ours = expected.places(), found.places()
    common = [key for key in ours if key in theirs]  # what was taken from the prefix cache went through no layer
    at = [ours[key] for key in common], [theirs[key] for key in common]
    largest = 0.0
    for number, place in enumerate(PLACES):
        shares = relative_difference(found.values[number][at[0]], expected.values[number][at[1]])
        largest = max(largest, float(shares.max(initial=0.0)))
        wrong = np.flatnonzero(shares > tolerance)
        if len(wrong):
            rows = [found.rows[at[0][i]] for i in wrong]
            i = min(range(len(rows)), key=lambda i: (rows[i].step, rows[i].ubatch, wrong[i]))
            ubatches = dict(sorted(Counter(row.ubatch for row in rows).items()))
            share = float(shares[wrong[i]])
            first = StateDifference(layer, place, rows[i], share, len(common), len(wrong), ubatches)
            return first, largest, len(common)
    return None, largest, len(common)


def relative_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    """[R, D], [R, D] → [R]: ‖found − expected‖ / ‖expected‖ of each row; infinite where it is no number."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.linalg.norm(a - b, axis=-1) / (np.linalg.norm(b, axis=-1) + _TINY)
    return np.asarray(np.nan_to_num(shares, nan=np.inf, posinf=np.inf))
