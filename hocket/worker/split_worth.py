"""Whether replaying a decode as ubatches takes longer here than replaying it whole. Decides nothing, says it once.

All ranks of an expert group replay together; each measures by its own GPU's clock, and rank 0 speaks. Rows stand in for
requests: tokens from all over the vocabulary, whose contexts are zeros in the padding's block.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.cache.storage import block_of, num_blocks_of
from hocket.worker.capture import TimeLimit
from hocket.worker.graphs import DecodeGraphs, Parts, name_of
from hocket.worker.inputs import HostInputs

logger = logging.getLogger(__name__)
MAX_CONTEXT = 1024
REPLAYS, ROUNDS = 3, 3
NOISE = 1.02
"""Below this ratio two times count as equal."""


@dataclass(frozen=True, slots=True)
class Compared:
    """µs of a replay of `size` rows, of the whole step and as ubatches."""

    size: int
    whole_us: float
    split_us: float

    @property
    def is_slower(self) -> bool:
        return self.split_us > NOISE * self.whole_us


def compare(
    graphs: DecodeGraphs,
    parts: Parts,
    sizes: Sequence[int],
    time_limit: TimeLimit,
    on_progress: Callable[[int, int], None],
) -> list[Compared]:
    """Both graphs of each of `sizes`, in contexts of `context_of(parts)` tokens. All ranks of a group together."""
    for cache in parts.kv_caches:
        block_of(cache, num_blocks_of(cache) - 1).zero_()

    def replay_us(size: int, num_ubatches: int) -> float:
        graph = graphs[size, num_ubatches]
        block, block_size = graph.inputs.scrap_block, graph.inputs.block_size
        graph.replay(stand_ins(size, context_of(parts), block, block_size, parts.model.config.vocab_size))
        return graph.replay_us(REPLAYS)

    found = []
    for done, size in enumerate(sizes):
        on_progress(done, len(sizes))
        with time_limit(f"replaying the {name_of(size, 1)} and as {parts.num_ubatches} ubatches"):
            whole, split = zip(
                *((replay_us(size, 1), replay_us(size, parts.num_ubatches)) for _ in range(ROUNDS)), strict=True
            )
            found.append(Compared(size, statistics.median(whole), statistics.median(split)))
    return found


def context_of(parts: Parts) -> int:
    """Tokens of a stand-in's context."""
    return min(parts.max_model_len, MAX_CONTEXT)


def stand_ins(num_rows: int, context: int, block: int, block_size: int, vocabulary: int) -> HostInputs:
    """A decode of `num_rows` requests with `context` tokens each, all of them in one block."""
    rows = np.arange(num_rows)
    return HostInputs(
        token_ids=rows * max(vocabulary // num_rows, 1) % vocabulary,
        positions=np.full(num_rows, context - 1),
        slots=block * block_size + rows % block_size,
        sources=None,
        block_table=np.full((num_rows, -(-context // block_size)), block, dtype=np.int32),
        seq_lens=np.full(num_rows, context, dtype=np.int32),
        query_start=np.arange(num_rows + 1, dtype=np.int32),
        max_query_len=1,
    )


def say(found: Sequence[Compared], num_ubatches: int, context: int) -> None:
    """One line for all sizes: a warning with both figures where splitting takes longer, else what it gains."""
    slower = [one for one in found if one.is_slower]
    if not slower:
        logger.info("decodes replayed whole and in %d ubatches (%s)", num_ubatches, _figures(found, context))
        return
    last = max(one.size for one in slower)
    pays_from = [one.size for one in found if one.size > last]
    advice = "--no-split-graphs leaves them whole"
    if pays_from:
        advice = f"--dbo-decode-token-threshold {last + 1} splits them from {pays_from[0]} rows on"
    said = "splitting costs time here: decodes replayed whole and in %d ubatches take %s; %s"
    logger.warning(said, num_ubatches, _figures(found, context), advice)


def _figures(found: Sequence[Compared], context: int) -> str:
    """Of the first and last size and the powers of two between them."""
    ends = found[0].size, found[-1].size
    shown = [one for one in found if one.size in ends or one.size & (one.size - 1) == 0]
    times = ", ".join(f"{one.size} rows {one.whole_us / 1e3:.2f} and {one.split_us / 1e3:.2f} ms" for one in shown)
    return f"{times}; contexts of {context:,} tokens"
