"""What was measured of a step as a row of the result. Knows no engine, and how figures belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.bench.cells import Cell
from hocket.bench.floor import Rates, floor_of, split_parts, step_parts
from hocket.bench.report import link_of, runs_in_fp8, spread
from hocket.bench.strategies import DUAL_BATCH, SERIAL
from hocket.config.backends import COPY_TRANSPORTS
from hocket.config.engine import EngineConfig

LANES = ("compute", "compute_halves", "comm", "comm_halves", "output")


@dataclass(eq=False)
class Measured:
    """A cell with a strategy: its runs, those of its lanes alone, its kernels, and its CUDA graph alone."""

    cell: Cell
    strategy: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    lanes: dict[str, Any] | None = None
    kernels: dict[str, Any] | None = None
    replay_us: float | None = None


def row_of(
    one: Measured, others: Sequence[Measured], config: EngineConfig, rank: Mapping[str, Any], rates: Rates | None
) -> dict[str, Any]:
    """tokens_per_s: of one rank. spread: least and largest of the repeats. split: [so many, of so many steps] of a run.

    parts_us: where rank 0's host was, medians over all steps of a run (`worker/laps.py`); on a GPU "forward" is the
    launching, and "sample" the waiting for the step before. computed_prompt_tokens: of a rank's run, those that were
    not found in the prefix cache. rank: its start-up facts.

    serial_us: of the same cell without overlap, in turn with it; None: not measured. compute_us, comm_us: the same
    step's compute and communication alone, *_halves_us: both of it in ubatches; bound_us: the larger of these two,
    which no order of two lanes can be faster than. output_us: the part of compute behind the last layer, so that a few
    layers can tell of many: layer_us and layer_bound_us, both of one layer without it. Where lanes were not timed
    alone, comm_us is the time of transfers in the steps themselves. exposed_comm_us: communication that nothing was
    computed beside, by exposed_from. max_nccl_ctas: of all steps of the engine, split or not.
    """
    cell, runs = one.cell, one.runs
    floor = _floor(one, config, rank, rates)
    step = [run["step_us"] for run in runs]
    serial = next((other for other in others if other.cell is cell and other.strategy == SERIAL), None)
    times = {"step_us": step} | _lane_times(one)
    if serial is not None:
        times["serial_us"] = [run["step_us"] for run in serial.runs]
    spreads = {name: spread(values) for name, values in times.items()}
    medians = {name: found["median"] for name, found in spreads.items()}
    step_us = spreads["step_us"]
    kernels = _kernels(one, config)
    return {
        "layers": config.model.num_layers,
        "dtype": "fp8" if runs_in_fp8(rank) else config.dtype,
        "device": config.device,
        "num_ranks": config.parallel.data_parallel_size,
        "expert_parallel": config.parallel.enable_expert_parallel,
        "phase": cell.phase,
        "tokens_per_gpu": cell.num_tokens,
        "context": cell.context,
        "prompt_len": cell.prompt_len,
        "num_requests": cell.num_requests,
        "transport": config.parallel.all2all_backend,
        "max_nccl_ctas": config.parallel.max_nccl_ctas,
        "experts": rank["moe_backend"],
        "attention": rank["attention_backend"],
        "graphs": all(run["graphs"] for run in runs),
        "strategy": one.strategy,
        "num_ubatches": config.overlap.num_ubatches if one.strategy == DUAL_BATCH else 1,
        "link": link_of(config),
        "repeats": len(runs),
        "steps": min(run["steps"] for run in runs),
        "computed_prompt_tokens": max(run["prompt_tokens"] for run in runs),
        "split": [runs[0]["split"], runs[0]["forwards"]],
        "parts_us": {part: spread([run["parts_us"][part] for run in runs])["median"] for part in runs[0]["parts_us"]},
        "serial_us": None,
        **{f"{name}_us": None for name in LANES},
        **medians,
        "bound_us": max(medians["compute_halves_us"], medians["comm_halves_us"]) if one.lanes else None,
        **_per_layer(one, medians, config.model.num_layers),
        **_exposed(one, medians, kernels),
        "lanes": one.lanes and {"graphs": one.lanes["graphs"], "bytes": one.lanes["bytes"]},
        "floor_us": floor["us"],
        "floor": floor,
        "tokens_per_s": cell.num_tokens / medians["step_us"] * 1e6,
        "kernels_per_step": (kernels or {}).get("per_step"),
        "kernels": kernels,
        "replay_us": one.replay_us,
        "spread": {name: [found["min"], found["max"]] for name, found in spreads.items()}
        | {"tokens_per_s": [cell.num_tokens / step_us[end] * 1e6 for end in ("max", "min")]},
    }


def _lane_times(one: Measured) -> dict[str, list[float]]:
    """µs of each repeat by key; of the transfers in the steps where there is nothing better."""
    if one.lanes is not None:
        return {f"{name}_us": one.lanes["us"][name] for name in LANES}
    comm = [run["comm_us"] for run in one.runs]
    return {} if None in comm else {"comm_us": comm}


def _per_layer(one: Measured, medians: Mapping[str, float], num_layers: int) -> dict[str, float | None]:
    if one.lanes is None:
        return {"layer_us": None, "layer_bound_us": None}
    output = medians["output_us"]
    bound = max(medians["compute_halves_us"] - output, medians["comm_halves_us"])
    return {"layer_us": (medians["step_us"] - output) / num_layers, "layer_bound_us": bound / num_layers}


def _kernels(one: Measured, config: EngineConfig) -> dict[str, Any] | None:
    """Without times of communication where copies do it: a profile of a replayed graph has them on compute's stream."""
    parallel = config.parallel
    are_copies = parallel.emulated_link is not None or parallel.all2all_backend in COPY_TRANSPORTS
    if one.kernels is None or not are_copies:
        return one.kernels
    return one.kernels | {"comm_us": None, "exposed_comm_us": None}


def _exposed(one: Measured, medians: Mapping[str, float], kernels: Mapping[str, Any] | None) -> dict[str, Any]:
    """By the lanes of the steps themselves or a profile of some, else what a step takes longer than its compute."""
    found = [run["exposed_us"] for run in one.runs]
    if None not in found:
        return {"exposed_comm_us": spread(found)["median"], "exposed_from": "lanes"}
    if kernels is not None and kernels["exposed_comm_us"] is not None:
        return {"exposed_comm_us": kernels["exposed_comm_us"], "exposed_from": "profile"}
    if one.lanes is not None:
        alone = medians["compute_halves_us" if one.strategy == DUAL_BATCH else "compute_us"]
        return {"exposed_comm_us": max(medians["step_us"] - alone, 0.0), "exposed_from": "step minus compute"}
    return {"exposed_comm_us": None, "exposed_from": None}


def _floor(one: Measured, config: EngineConfig, rank: Mapping[str, Any], rates: Rates | None) -> dict[str, Any]:
    """Of the step; where it is split also of the unsplit one: "unsplit"."""
    is_fp8, step = runs_in_fp8(rank), one.cell.shape
    sizes = config.model, step, config.parallel.expert_parallel_size, config.dtype
    whole = floor_of(step_parts(*sizes, is_fp8=is_fp8), rates)
    if one.strategy != DUAL_BATCH:
        return whole
    return floor_of(split_parts(*sizes, config.overlap.num_ubatches, is_fp8=is_fp8), rates) | {"unsplit": whole}
