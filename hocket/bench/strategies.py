"""The strategies that steps are measured with, on one engine, and how it is told. Knows only the offline front door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.bench.cells import Cell
from hocket.bench.overlap import check_ranks, refuse_forced_split
from hocket.config.options import MAX_TOKENS, Options
from hocket.llm import LLM

SERIAL, DUAL_BATCH = STRATEGIES = "serial", "dual_batch"


def default_strategies(options: Options) -> tuple[str, ...]:
    """What the options ask for."""
    return (DUAL_BATCH,) if options.enable_dbo or options.ubatch_size > 1 else (SERIAL,)


def options_for(options: Options, strategies: Sequence[str], cells: Sequence[Cell]) -> Options:
    """The user's, of an engine that can run every cell with each of the strategies: it splits from the smallest on.

    Raises:
        ConfigError: ranks have nothing to overlap, or HOCKET_FORCE_SPLIT would split what is to be serial.
    """
    off = replace(options, enable_dbo=False, ubatch_size=0)
    refuse_forced_split(off, "where strategies are measured")
    if DUAL_BATCH not in strategies:
        return off
    check_ranks(options, f"with strategies {DUAL_BATCH}")
    num_ubatches = max(options.ubatch_size, 2)
    least = {phase: [cell.num_tokens for cell in cells if cell.phase == phase] for phase in ("decode", "prefill")}
    thresholds = {
        f"dbo_{phase}_token_threshold": max(num_ubatches, min(tokens)) for phase, tokens in least.items() if tokens
    }
    return replace(off, ubatch_size=num_ubatches, **thresholds)  # type: ignore[arg-type]


def use(llm: LLM, strategy: str) -> None:
    """Run the following steps so. Nothing may be being generated."""
    overlap = llm.config.overlap
    if overlap.num_ubatches == 1:
        return
    if strategy == SERIAL:
        llm.client.set_thresholds(MAX_TOKENS, MAX_TOKENS)
    else:
        llm.client.set_thresholds(overlap.decode_token_threshold, overlap.prefill_token_threshold)
