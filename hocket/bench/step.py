"""Steps of the whole engine: what one takes, and the least it could take. Knows only the offline front door.

A step's time is the wall time of the ranks' loop over steps of one kind, divided by their number: scheduling, exchange,
sampling and whatever the host does are in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hocket.bench.cells import PHASES, Cell, sweep_of
from hocket.bench.floor import Rates, floor_of, step_parts
from hocket.bench.rates import GivenRates, rates_of
from hocket.bench.report import check_output, emit, link_of, provenance, runs_in_fp8, spread, strategy_of
from hocket.bench.requests import generate_random
from hocket.bench.shapes import changed
from hocket.bench.table import table_of
from hocket.channel.messages import CountKernels, TimeReplays
from hocket.config.engine import EngineConfig
from hocket.config.graphs import fitting_size
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import HocketError
from hocket.llm import LLM
from hocket.overlap.vote import GraphReason, Reason

BATCHED_TOKENS = 4096
REPLAYS = 100
REPLAYS_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to measure, and on which shape of the model.

    reuse_prompts: decodes of all repeats have the same prompts, of which most is found in the prefix cache; otherwise
    every prompt is new and nothing is cached.
    """

    tokens_per_gpu: tuple[int, ...]
    phases: tuple[str, ...] = PHASES
    context: int = 1024
    num_steps: int = 32
    num_prefill_steps: int = 8
    repeats: int = 5
    rates: GivenRates = field(default_factory=GivenRates)
    slice_of_ep: int | None = None
    num_layers: int | None = None
    count_kernels: bool = False
    reuse_prompts: bool = False


def run(options: Options, sweep: Sweep, *, output: str | None) -> dict[str, Any]:
    """Measure every cell `repeats` times in turn, after one round to warm up; print a table and, last, JSON."""
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
    with changed(options, sweep.slice_of_ep, sweep.num_layers) as (shaped, slice_of):
        engine_options = _engine_options(shaped, sweep, cells, batched)
        config = resolve(engine_options)
        rates = rates_of(config.device, sweep.rates)
        started = time.perf_counter()
        with LLM.from_options(engine_options, progress=True) as llm:
            ready_s = time.perf_counter() - started
            rounds = []
            for seed in range(sweep.repeats + 1):
                rounds.append([_measure(llm, cell, _seed_of(cell, sweep, seed)) for cell in cells])
            kernels: list[dict[str, Any] | None] = [None] * len(cells)
            if sweep.count_kernels:
                kernels = [_kernels(llm, cell, _seed_of(cell, sweep, sweep.repeats + 1)) for cell in cells]
            replays = [_replay_us(llm, cell, _seed_of(cell, sweep, sweep.repeats + 2)) for cell in cells]
            ranks = llm.ranks
    rows = [
        {"model": options.model, "slice": slice_of and slice_of.as_row()}
        | _row(cell, [one[i] for one in rounds[1:]], config, ranks[0], rates)
        | {"kernels_per_step": (kernels[i] or {}).get("per_step"), "kernels": kernels[i]}
        | {"replay_us": replays[i], "reused_prompts": sweep.reuse_prompts}
        for i, cell in enumerate(cells)
    ]
    report = provenance("step") | {"ready_s": ready_s, "ranks": ranks, "rows": rows}
    print(table_of([report]))
    emit(report, output)
    return report


def _engine_options(options: Options, sweep: Sweep, cells: Sequence[Cell], batched_tokens: int) -> Options:
    """The user's, with room for the largest cell."""
    return replace(
        options,
        skip_tokenizer_init=True,
        enable_prefix_caching=sweep.reuse_prompts,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=options.max_num_seqs or max(cell.num_running for cell in cells),
        max_model_len=options.max_model_len or max(cell.longest for cell in cells),
    )


def _seed_of(cell: Cell, sweep: Sweep, repeat: int) -> int:
    return 0 if sweep.reuse_prompts and cell.phase == "decode" else repeat + 1


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
        "steps": steps,
        "graphs": all(rank["graphs"].get(GraphReason.GRAPH.label, 0) >= steps for rank in ranks),
        "prompt_tokens": max(rank["prompt_tokens"] for rank in ranks),
        "split": min(rank["overlap"]["split"] for rank in ranks),
        "forwards": ranks[0]["overlap"]["forwards"],
        "parts_us": {part: times["median"] for part, times in ranks[0]["times_us"].items()},
    }


def _kernels(llm: LLM, cell: Cell, seed: int) -> dict[str, Any] | None:
    """Kernels of a step on rank 0 (`worker/kernel_count.py`), by one more run."""
    llm.client.group.send(0, CountKernels(phase=cell.phase, num_tokens=cell.num_tokens))
    _generate(llm, cell, seed)
    found: dict[str, Any] | None = llm.stats()[0]["kernels"]
    return found


def _replay_us(llm: LLM, cell: Cell, seed: int) -> float | None:
    """The step's CUDA graph alone, replayed back to back on all ranks, of the rank that took longest; None: no graph.

    What it takes less than a step is what the host adds.
    """
    size = fitting_size(llm.ranks[0].get("graphs", {}).get("sizes", ()), cell.num_tokens)
    if cell.phase != "decode" or not size:
        return None
    llm.stats(reset=True)
    _generate(llm, cell, seed)
    overlap, num_ubatches = llm.stats()[0]["overlap"], 1
    if overlap["reasons"].get("decode", {}).get(Reason.SPLIT.label):
        num_ubatches += max(cut.count("+") for cut in overlap["ubatch_tokens"])
    llm.client.group.broadcast(TimeReplays(size=size, count=REPLAYS, num_ubatches=num_ubatches))
    deadline = time.monotonic() + REPLAYS_LIMIT_S
    while time.monotonic() < deadline:
        ranks = llm.stats()
        found = [float(rank["replay_us"]) for rank in ranks if "replay_us" in rank]
        if len(found) == len(ranks):
            return max(found)
        time.sleep(0.05)
    raise HocketError(f"replaying the CUDA graph of {size} rows took more than {REPLAYS_LIMIT_S:g} s")


def _row(
    cell: Cell, runs: list[dict[str, Any]], config: EngineConfig, rank: dict[str, Any], rates: Rates | None
) -> dict[str, Any]:
    """tokens_per_s: of one rank. spread: least and largest of the repeats. split: [so many, of so many steps] of a run.

    parts_us: where rank 0's host was, medians over all steps of a run (`worker/laps.py`); on a GPU "forward" is the
    launching, and "sample" the waiting for the step before. computed_prompt_tokens: of a rank's run, those that were
    not found in the prefix cache.
    """
    is_fp8 = runs_in_fp8(rank)
    parts = step_parts(config.model, cell.shape, config.parallel.expert_parallel_size, config.dtype, is_fp8=is_fp8)
    floor = floor_of(parts, rates)
    step_us = spread([one["step_us"] for one in runs])
    comm = [one["comm_us"] for one in runs]
    return {
        "layers": config.model.num_layers,
        "dtype": "fp8" if is_fp8 else config.dtype,
        "device": config.device,
        "num_ranks": config.parallel.data_parallel_size,
        "expert_parallel": config.parallel.enable_expert_parallel,
        "phase": cell.phase,
        "tokens_per_gpu": cell.num_tokens,
        "context": cell.context,
        "prompt_len": cell.prompt_len,
        "num_requests": cell.num_requests,
        "transport": config.parallel.all2all_backend,
        "experts": rank["moe_backend"],
        "attention": rank["attention_backend"],
        "graphs": all(one["graphs"] for one in runs),
        "strategy": strategy_of(config),
        "link": link_of(config),
        "repeats": len(runs),
        "steps": min(one["steps"] for one in runs),
        "computed_prompt_tokens": max(one["prompt_tokens"] for one in runs),
        "split": [runs[0]["split"], runs[0]["forwards"]],
        "parts_us": {part: spread([one["parts_us"][part] for one in runs])["median"] for part in runs[0]["parts_us"]},
        "step_us": step_us["median"],
        "floor_us": floor["us"],
        "floor": floor,
        "comm_us": None if None in comm else spread(comm)["median"],
        "tokens_per_s": cell.num_tokens / step_us["median"] * 1e6,
        "spread": {
            "step_us": [step_us["min"], step_us["max"]],
            "tokens_per_s": [cell.num_tokens / step_us[end] * 1e6 for end in ("max", "min")],
        },
    }
