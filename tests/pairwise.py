"""A small set of cells in which every pair of values of any two dimensions occurs (all-pairs testing)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = dict[str, Any]


def full_grid(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Every allowed combination."""
    cells = (dict(zip(dimensions, values, strict=True)) for values in itertools.product(*dimensions.values()))
    return [cell for cell in cells if allowed(cell)]


def pairwise_cover(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Cells in which every pair that an allowed combination has occurs."""
    return cover(full_grid(dimensions, allowed), lambda cell: cell)


def cover(cells: Sequence[Cell], values_of: Callable[[Cell], Cell]) -> list[Cell]:
    """Greedy: take the cell that covers most pairs of `values_of` it not seen yet, until every pair has been."""
    pairs_of = [set(itertools.combinations(values_of(cell).items(), 2)) for cell in cells]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(cells)), key=lambda i: len(pairs_of[i] & missing))
        missing -= pairs_of[best]
        chosen.append(cells[best])
    return chosen
