"""Steps of the whole engine: what one takes, and the least it could take. Knows only the offline front door.

A step's time is the wall time of the ranks' loop over steps of one kind, divided by their number: scheduling, exchange,
sampling and whatever the host does are in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hocket.bench import strategies
from hocket.bench.attached import Attached, recording
from hocket.bench.cells import PHASES, SPARE_STEPS, Cell, sweep_of
from hocket.bench.rates import GivenRates, rates_of
from hocket.bench.report import check_output, emit, provenance
from hocket.bench.requests import generate_random
from hocket.bench.shapes import Slice, changed, published_name, token_bytes
from hocket.bench.step_rows import Measured, row_of
from hocket.bench.strategies import DUAL_BATCH, SERIAL
from hocket.bench.table import table_of
from hocket.channel.messages import CountKernels, TimeLanes, TimeReplays
from hocket.config.graphs import fitting_size
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import HocketError
from hocket.llm import LLM
from hocket.overlap.vote import GraphReason, Reason

BATCHED_TOKENS = 4096
REPLAYS = 100
REPLAYS_LIMIT_S = 60.0
LANE_STEPS = {"decode": 8, "prefill": 3}
"""Steps that one figure of a lane alone goes over."""
LINK_DISPATCHES = ("fp8", "dtype")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to measure, and on which shape of the model.

    reuse_prompts: decodes of all repeats have the same prompts, of which most is found in the prefix cache; otherwise
    every prompt is new and nothing is cached. link_dispatch: what a slice's emulated link counts for dispatched rows,
    of LINK_DISPATCHES. strategies: in turn, on the same engine.
    """

    tokens_per_gpu: tuple[int, ...]
    phases: tuple[str, ...] = PHASES
    strategies: tuple[str, ...] = (SERIAL,)
    context: int = 1024
    num_steps: int = 32
    num_prefill_steps: int = 8
    repeats: int = 5
    rates: GivenRates = field(default_factory=GivenRates)
    slice_of_ep: int | None = None
    num_layers: int | None = None
    num_dense_layers: int | None = None
    link_dispatch: str = LINK_DISPATCHES[0]
    count_kernels: bool = False
    reuse_prompts: bool = False


def run(
    options: Options, sweep: Sweep, *, output: str | None, trace: str | None = None, trace_steps: int = 1
) -> dict[str, Any]:
    """Measure every cell `repeats` times in turn, after one round to warm up; print a table and, last, JSON. trace: one
    more run of each cell, which is not measured, is recorded into files of this name."""
    check_output(output)
    batched = options.max_num_batched_tokens or max(BATCHED_TOKENS, *(2 * n for n in sweep.tokens_per_gpu))
    cells = sweep_of(
        sweep.phases,
        sweep.tokens_per_gpu,
        sweep.context,
        num_steps=sweep.num_steps,
        num_prefill_steps=sweep.num_prefill_steps,
        batched_tokens=batched,
    )
    asked = [Measured(cell, strategy) for cell in cells for strategy in sweep.strategies]
    attached = Attached.asked(trace, trace_steps, options, [_trace_part(one, cells, sweep) for one in asked])
    with changed(options, sweep.slice_of_ep, sweep.num_layers, sweep.num_dense_layers) as (shaped, slice_of):
        engine_options = _engine_options(shaped, sweep, cells, batched, slice_of)
        config = resolve(engine_options)
        rates = rates_of(config.device, sweep.rates)
        started = time.perf_counter()
        with LLM.from_options(engine_options, progress=True) as llm:
            ready_s = time.perf_counter() - started
            found = _all_measured(llm, cells, asked, sweep)
            for one in found:
                _trace(llm, one, _trace_part(one, cells, sweep), sweep, attached)
            ranks = llm.ranks
    model = options.model if slice_of is None else published_name(config.model, options.model)
    about = {"model": model, "slice": slice_of and slice_of.as_row(), "reused_prompts": sweep.reuse_prompts}
    rows = [about | row_of(one, found, config, ranks[0], rates) for one in found]
    report = provenance("step") | {"ready_s": ready_s, "ranks": ranks, "rows": rows}
    print(table_of([report]))
    emit(report, output)
    return report


def _engine_options(
    options: Options, sweep: Sweep, cells: Sequence[Cell], batched_tokens: int, slice_of: Slice | None
) -> Options:
    """The user's, with room for the largest cell and for the strategies; an emulated link has a slice's volume."""
    found = replace(
        strategies.options_for(options, sweep.strategies, cells),
        skip_tokenizer_init=True,
        enable_prefix_caching=sweep.reuse_prompts,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=options.max_num_seqs or max(cell.num_running for cell in cells),
        max_model_len=options.max_model_len or max(cell.longest for cell in cells),
    )
    if slice_of is None or found.emulate_link_gb_per_s is None or found.emulate_link_token_bytes is not None:
        return found
    config = resolve(found)
    is_fp8, num_ranks = sweep.link_dispatch == "fp8", config.parallel.expert_parallel_size
    out, back = token_bytes(config.model, num_ranks, config.dtype, is_fp8=is_fp8)
    return replace(found, emulate_link_token_bytes=f"{out},{back}")


def _all_measured(llm: LLM, cells: Sequence[Cell], asked: Sequence[Measured], sweep: Sweep) -> list[Measured]:
    """Each cell with each strategy, but for those that cannot be: standard error says why."""
    found = list(asked)
    for repeat in range(sweep.repeats + 1):
        for one in list(found):
            strategies.use(llm, one.strategy)
            one.runs.append(_measure(llm, one.cell, _seed_of(one, sweep, repeat)))
            if (why := _other_than_asked(one)) is not None:
                print(f"{one.strategy} of a {one.cell.phase} of {one.cell.num_tokens} tokens: {why}", file=sys.stderr)
                found.remove(one)
    for one in found:
        del one.runs[0]  # it warmed up
        strategies.use(llm, one.strategy)
        if sweep.count_kernels or (DUAL_BATCH in sweep.strategies and llm.config.device != "cpu"):
            one.kernels = _kernels(llm, one.cell, _seed_of(one, sweep, sweep.repeats + 1))
    for one in found:
        strategies.use(llm, one.strategy)
        if one.cell.phase == "decode" and all(run["graphs"] for run in one.runs):
            num_ubatches = 1 if one.strategy == SERIAL else llm.config.overlap.num_ubatches
            one.replay_us = _replay_us(llm, one.cell, num_ubatches, _seed_of(one, sweep, sweep.repeats + 2))
    if DUAL_BATCH in sweep.strategies:
        _time_lanes(llm, cells, found, sweep.repeats)
    if not found:
        raise HocketError("nothing could be measured as asked for")
    return found


def _seed_of(one: Measured, sweep: Sweep, repeat: int) -> int:
    """Prompts that no run had before, also of another strategy; or always the same ones."""
    if sweep.reuse_prompts and one.cell.phase == "decode":
        return 0
    return repeat * len(sweep.strategies) + sweep.strategies.index(one.strategy) + 1


def _generate(llm: LLM, cell: Cell, seed: int) -> None:
    generate_random(
        llm, requests_per_rank=cell.num_requests, prompt_len=cell.prompt_len, max_tokens=cell.output_len, seed=seed
    )


def _measure(llm: LLM, cell: Cell, seed: int) -> dict[str, Any]:
    """One run: µs per step, of the rank that took longest, and of its transfers (None: not measured)."""
    llm.stats(reset=True)
    _generate(llm, cell, seed)
    ranks = llm.stats()
    found = [rank["pace"].get(cell.phase, {}).get(str(cell.num_tokens)) for rank in ranks]
    steps = min(one["steps"] if one else 0 for one in found)
    if steps < cell.num_steps:
        preempted = sum(rank["num_preemptions"] for rank in ranks)
        raise HocketError(
            f"only {steps} of {cell.num_steps} steps were a {cell.phase} of {cell.num_tokens} tokens on every rank "
            f"({preempted} preemptions so far); see --max-num-seqs and the size of the KV cache"
        )
    comm_us = max(one["comm_us"] / one["steps"] for one in found)
    return {
        "step_us": max(one["us"] / one["steps"] for one in found),
        "comm_us": comm_us or None,
        "exposed_us": max(one["exposed_us"] / one["steps"] for one in found) if comm_us else None,
        "steps": steps,
        "graphs": all(rank["graphs"].get(GraphReason.GRAPH.label, 0) >= steps for rank in ranks),
        "prompt_tokens": max(rank["prompt_tokens"] for rank in ranks),
        "split": min(rank["overlap"]["split"] for rank in ranks),
        "forwards": ranks[0]["overlap"]["forwards"],
        "reasons": ranks[0]["overlap"]["reasons"].get(cell.phase, {}),
        "parts_us": {part: times["median"] for part, times in ranks[0]["times_us"].items()},
    }


def _other_than_asked(one: Measured) -> str | None:
    """Why the last run's steps were not as the strategy wants them, if so."""
    steps, reasons = one.runs[-1]["steps"], one.runs[-1]["reasons"]
    num_split = reasons.get(Reason.SPLIT.label, 0)
    if one.strategy == SERIAL or num_split >= steps:
        return None
    others = [reason for reason in reasons if reason != Reason.SPLIT.label]
    said = f"{num_split} of {steps} steps were split ({', '.join(others)}), so it is left out"
    if Reason.NO_SPLIT_GRAPH.label in others:
        said += "; --enforce-eager splits every step"
    return said


def _kernels(llm: LLM, cell: Cell, seed: int) -> dict[str, Any] | None:
    """Kernels of a step on rank 0 (`worker/kernel_count.py`), by one more run."""
    llm.client.group.send(0, CountKernels(phase=cell.phase, num_tokens=cell.num_tokens))
    _generate(llm, cell, seed)
    found: dict[str, Any] | None = llm.stats()[0]["kernels"]
    return found


def _trace_part(one: Measured, cells: Sequence[Cell], sweep: Sweep) -> str:
    """What the name of its trace ends with, where there are several."""
    cell = f"-{one.cell.phase}-{one.cell.num_tokens}" if len(cells) > 1 else ""
    return cell + (f"-{one.strategy}" if len(sweep.strategies) > 1 else "")


def _trace(llm: LLM, one: Measured, part: str, sweep: Sweep, attached: Attached | None) -> None:
    """By one more run, without the first steps of its kind, which are of fewer tokens or cold; None: not asked for."""
    if attached is None:
        return
    strategies.use(llm, one.strategy)
    what = f"{one.cell.phase} of {one.cell.num_tokens} tokens, {one.strategy}, in bench step"
    with recording(llm, attached, what, phase=one.cell.phase, skip=SPARE_STEPS, part=part):
        _generate(llm, one.cell, _seed_of(one, sweep, sweep.repeats + 3))


def _time_lanes(llm: LLM, cells: Sequence[Cell], found: Sequence[Measured], repeats: int) -> None:
    """Compute and communication alone of each cell. Where they cannot be had, what was measured before still counts."""
    for cell in cells:
        try:
            lanes = _lanes(llm, cell, repeats)
        except HocketError as error:
            print(f"compute and communication alone are not known: {error}", file=sys.stderr)
            return
        for one in found:
            one.lanes = lanes if one.cell is cell else one.lanes


def _lanes(llm: LLM, cell: Cell, repeats: int) -> dict[str, Any]:
    """Compute and communication alone: µs of each repeat, of the rank that took longest, and rank 0's bytes."""
    asked = TimeLanes(
        phase=cell.phase,
        num_tokens=cell.num_tokens,
        length=round(cell.context),
        repeats=repeats,
        count=LANE_STEPS[cell.phase],
    )
    ranks = llm.client.time_lanes(asked, 4 * (repeats + 1) * llm.config.graphs.capture_timeout_s)
    us = {
        name: [max(values) for values in zip(*(rank.us[name] for rank in ranks), strict=True)] for name in ranks[0].us
    }
    return {"us": us, "bytes": ranks[0].bytes, "graphs": ranks[0].captured}


def _replay_us(llm: LLM, cell: Cell, num_ubatches: int, seed: int) -> float:
    """The step's CUDA graph alone, replayed back to back on all ranks, of the rank that took longest.

    What it takes less than a step is what the host adds.
    """
    size = fitting_size(llm.ranks[0]["graphs"]["sizes"], cell.num_tokens)
    _generate(llm, cell, seed)
    llm.client.group.broadcast(TimeReplays(size=size, count=REPLAYS, num_ubatches=num_ubatches))
    deadline = time.monotonic() + REPLAYS_LIMIT_S
    while time.monotonic() < deadline:
        ranks = llm.stats()
        found = [float(rank["replay_us"]) for rank in ranks if "replay_us" in rank]
        if len(found) == len(ranks):
            return max(found)
        time.sleep(0.05)
    raise HocketError(f"replaying the CUDA graph of {size} rows took more than {REPLAYS_LIMIT_S:g} s")
