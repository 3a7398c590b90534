"""Which decode steps get a CUDA graph. Knows nothing of how they are captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.errors import ConfigError

LARGEST = 512
"""Largest size captured unless asked for."""
LEAST_STEP = 8


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """sizes: tokens of a rank's decode step for which there is a graph, ascending; empty: none. A step takes the
    smallest that all ranks fit into. split_sizes: those for which there is one of the step as ubatches too.
    capture_timeout_s: seconds that one of them may take."""

    sizes: tuple[int, ...] = ()
    split_sizes: tuple[int, ...] = ()
    capture_timeout_s: float = 60.0


def captured_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then in steps of a quarter of the power of two below (at least 8) to `largest`, which is one of them:
    from 32 rows on at most a fifth of a step is padding."""
    sizes = [size for size in (1, 2, 4, 8) if size <= largest]
    size = 8
    while size < largest:
        size = min(size + max(LEAST_STEP, 1 << size.bit_length() - 1 >> 2), largest)
        sizes.append(size)
    return tuple(sorted({*sizes, largest}))


def fitting_size(sizes: Sequence[int], num_tokens: int) -> int:
    """The smallest of the ascending `sizes` that holds so many tokens; 0: none."""
    return next((size for size in sizes if size >= num_tokens), 0)


def least_for_split(size: int, num_ubatches: int) -> int:
    """Fewest tokens of a rank that has one for each ubatch of the split graph of `size` rows: rows are cut at equal
    numbers, and the last ubatch takes the rest."""
    return (num_ubatches - 1) * (size // num_ubatches) + 1


def asked_sizes(text: str, max_num_seqs: int) -> tuple[int, ...]:
    """The sizes of an option, "1,2,4", ascending; those over max_num_seqs become that.

    Raises:
        ConfigError: it is not that.
    """
    try:
        sizes = {int(part) for part in text.split(",")}
    except ValueError:
        sizes = {0}
    if min(sizes) < 1:
        raise ConfigError("cudagraph_capture_sizes", text, "numbers of at least 1 with commas between them, as 1,2,4,8")
    kept = {size for size in sizes if size <= max_num_seqs} | {max_num_seqs for size in sizes if size > max_num_seqs}
    return tuple(sorted(kept))
