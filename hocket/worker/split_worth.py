"""Whether steps take longer here as ubatches than whole. Decides nothing, says it once, before anything is served.

All ranks of an expert group run them together; each measures by its own GPU's clock, and rank 0 speaks. In decodes that
are replayed rows stand in for requests: tokens from all over the vocabulary, whose contexts are zeros in the padding's
block. Steps that are launched are those that `profile.py` runs.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hocket.cache.storage import block_of, num_blocks_of
from hocket.config.engine import EngineConfig
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
    """µs of a step of `size` rows or tokens, whole and as ubatches."""

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
    """Both graphs of each of `sizes`, in contexts of `context_of` tokens. All ranks of a group together."""
    for cache in parts.kv_caches:
        block_of(cache, num_blocks_of(cache) - 1).zero_()
    context = context_of(parts.max_model_len)

    def replay_us(size: int, num_ubatches: int) -> float:
        graph = graphs[size, num_ubatches]
        block, block_size = graph.inputs.scrap_block, graph.inputs.block_size
        graph.replay(stand_ins(size, context, block, block_size, parts.model.config.vocab_size))
        return graph.replay_us(REPLAYS)

    found = []
    for done, size in enumerate(sizes):
        on_progress(done, len(sizes))
        with time_limit(f"replaying the {name_of(size, 1)} and as {parts.num_ubatches} ubatches"):
            found.append(in_turn(size, partial(replay_us, size, 1), partial(replay_us, size, parts.num_ubatches)))
    return found


def in_turn(size: int, whole_us: Callable[[], float], split_us: Callable[[], float]) -> Compared:
    """The median of ROUNDS times each, which take turns."""
    whole, split = zip(*((whole_us(), split_us()) for _ in range(ROUNDS)), strict=True)
    return Compared(size, statistics.median(whole), statistics.median(split))


def context_of(max_model_len: int) -> int:
    """Tokens of a stand-in's context."""
    return min(max_model_len, MAX_CONTEXT)


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
    """One line for all sizes of decodes that are replayed: a warning with both figures where splitting takes longer,
    else what it gains."""
    what, figures = f"decodes replayed whole and in {num_ubatches} ubatches", _figures(found, "rows")
    _say(what, found, f"{figures}; contexts of {context:,} tokens", "decode", "rows", "--no-split-graphs")


def say_launched(compared: Mapping[str, Sequence[Compared]], config: EngineConfig) -> None:
    """The same of steps that are launched kernel by kernel, a line for each phase."""
    for phase, found in compared.items():
        what, figures = (
            f"{phase}s launched whole and in {config.overlap.num_ubatches} ubatches",
            _figures(found, "tokens"),
        )
        if phase == "decode":
            figures += f"; contexts of {context_of(config.scheduler.max_model_len):,} tokens"
        _say(what, found, figures, phase, "tokens", f"--dbo-{phase}-token-threshold {found[-1].size + 1}")


def _say(what: str, found: Sequence[Compared], figures: str, phase: str, unit: str, whole: str) -> None:
    """found: from the smallest size on. whole: the option that leaves all of them whole."""
    slower = [one for one in found if one.is_slower]
    if not slower:
        logger.info("%s (%s)", what, figures)
        return
    last = max(one.size for one in slower)
    pays_from = [one.size for one in found if one.size > last]
    advice = f"{whole} leaves them whole"
    if pays_from:
        advice = f"--dbo-{phase}-token-threshold {last + 1} splits them from {pays_from[0]} {unit} on"
    logger.warning("splitting costs time here: %s take %s; %s", what, figures, advice)


def _figures(found: Sequence[Compared], unit: str) -> str:
    """Of the first and last size and the powers of two between them."""
    ends = found[0].size, found[-1].size
    shown = [one for one in found if one.size in ends or one.size & (one.size - 1) == 0]
    return ", ".join(f"{one.size} {unit} {one.whole_us / 1e3:.2f} and {one.split_us / 1e3:.2f} ms" for one in shown)
