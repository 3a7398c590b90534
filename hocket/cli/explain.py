"""`hocket explain`: what a configuration would do, told by the parts that would do it. Starts no rank."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Any

import typer

from hocket.cli.options import engine_options
from hocket.config.engine import EngineConfig
from hocket.config.options import MAX_TOKENS, Options
from hocket.envs import FORCE_SPLIT
from hocket.overlap import schedule, vote
from hocket.overlap.schedule import Launch, Schedule
from hocket.overlap.vote import Row
from hocket.trace.spans import Stage


@engine_options()
def explain(
    *,
    options: Options,
    json_output: Annotated[bool, typer.Option("--json", help="the same as one JSON object")] = False,
) -> None:
    """Print what a configuration would do: ranks, experts, which steps would split, and in which order they would run.

    Nothing is loaded and no rank is started; a model's config.json is enough.

    Example: hocket explain --data-parallel-size 2 --enable-expert-parallel --enable-dbo
    """
    from hocket.config.resolve import resolve

    found = describe(resolve(options))
    print(json.dumps(found, ensure_ascii=False) if json_output else "\n".join(_lines(found)))


def describe(config: EngineConfig) -> dict[str, Any]:
    """The plan as plain values."""
    from hocket.moe.placement import ExpertPlacement

    parallel, moe, overlap = config.parallel, config.model.moe, config.overlap
    placement = ExpertPlacement(moe.num_experts, parallel.expert_parallel_size, parallel.expert_placement_strategy)
    counts = [len(placement.experts_of(rank)) for rank in range(placement.num_ranks)]
    link = parallel.emulated_link
    found: dict[str, Any] = {
        "model": {
            "path": config.model_path,
            "type": config.model.model_type,
            "layers": config.model.num_layers,
            "sparse_layers": sum(moe.layers),
            "dtype": config.dtype,
        },
        "ranks": parallel.data_parallel_size,
        "experts": {
            "total": moe.num_experts,
            "per_token": moe.top_k,
            "by_rank": counts,
            "shared": moe.num_shared_experts,
        },
        "transport": parallel.all2all_backend,
        "emulated_link": None if link is None else {"gb_per_s": link.gb_per_s, "latency_us": link.latency_us},
        "num_ubatches": overlap.num_ubatches,
        "is_forced": overlap.force_split,
    }
    if overlap.num_ubatches > 1:
        found |= {
            "executor": overlap.executor,
            "splits": {phase: _splits(config, phase) for phase in schedule.PHASES},
            "schedules": {phase: _schedule(config, phase) for phase in schedule.PHASES},
        }
    return found


def _splits(config: EngineConfig, phase: str) -> list[dict[str, Any]]:
    """Runs of step sizes, equal on all ranks, with the reason the vote gives them; it changes at thresholds."""
    overlap, limits = config.overlap, config.scheduler
    most = min(limits.max_num_batched_tokens, limits.max_num_seqs if phase == "decode" else MAX_TOKENS)
    thresholds = {overlap.decode_token_threshold, overlap.prefill_token_threshold}
    thresholds |= {size + 1 for size in _graph_sizes(config)[-1:]}
    starts = sorted({1} | {tokens for tokens in thresholds if tokens <= most})
    found: list[dict[str, Any]] = []
    for first, last in pairwise((*starts, most + 1)):
        reason = _reason(config, phase, first)
        if found and found[-1]["reason"] == reason:
            found[-1]["tokens"][1] = last - 1
        else:
            found.append({"tokens": [first, last - 1], "reason": reason})
    return found


def _reason(config: EngineConfig, phase: str, tokens: int) -> str:
    column = [0] * vote.NUM_ROWS
    column[Row.TOKENS] = tokens
    column[Row.MAY_SPLIT] = 1
    column[Row.GRAPH_MODE] = 1
    column[Row.UNIFORM_QUERY] = int(phase == "decode")
    if config.overlap.cut == "cost":
        column[vote.WISHED_CUTS] = [tokens // 2] * (config.overlap.num_ubatches - 1)  # the reason depends on none
    table = [column] * config.parallel.expert_parallel_size
    return vote.decide(table, config.overlap, _graph_sizes(config)).reason.label


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Of decodes in CUDA graphs, as far as can be told without the ranks."""
    from hocket.moe.transport.registry import transport_class

    return config.graphs.sizes if transport_class(config.parallel.all2all_backend).captures else ()


def _schedule(config: EngineConfig, phase: str) -> dict[str, Any]:
    """The order of one sparse layer in the steady state, and what hides what."""
    chosen = _chosen(config, phase)
    order, first = _steady_state(config, chosen)
    lanes = [
        {"comm": _short(send, first), "compute": [c.text(first) for c in compute]}
        for send, compute in schedule.hidden_under(order)
    ]
    return {"name": chosen.name, "order": [launch.text(first) for launch in order], "lanes": lanes}


def _chosen(config: EngineConfig, phase: str) -> Schedule:
    """As the executor chooses, by the lane that transfers run on."""
    from hocket.moe.transport.registry import transport_class
    from hocket.ubatch.lanes import WorkerLane
    from hocket.ubatch.stream_lane import StreamLane

    lane = WorkerLane if config.device == "cpu" else StreamLane
    launch_blocks = transport_class(config.parallel.all2all_backend).launch_blocks
    return schedule.choose(phase, launch_blocks=launch_blocks, has_own_thread=lane.has_own_thread)


def _steady_state(config: EngineConfig, chosen: Schedule) -> tuple[list[Launch], int]:
    """The launches from one layer's first dispatch to the next one's, and that layer's number."""
    from hocket.moe.transport.link_emulator import LinkEmulator
    from hocket.moe.transport.registry import transport_class

    emulated = config.parallel.emulated_link is not None
    transport = LinkEmulator if emulated else transport_class(config.parallel.all2all_backend)
    order = schedule.launch_order(
        chosen,
        num_ubatches=config.overlap.num_ubatches,
        num_layers=config.overlap.num_ubatches + 3,
        is_apart=transport.is_apart,
        has_shared=config.model.moe.num_shared_experts > 0,
    )
    first = config.overlap.num_ubatches
    begin, end = (order.index(Launch(Stage.DISPATCH, 0, layer, "send")) for layer in (first, first + 1))
    return order[begin:end], first


def _short(send: Launch, first: int) -> str:
    return send.text(first).removesuffix(" send")


def _lines(found: dict[str, Any]) -> list[str]:
    model, experts = found["model"], found["experts"]
    counts = " / ".join(str(count) for count in dict.fromkeys(experts["by_rank"]))
    link = found["emulated_link"]
    stretched = (
        "" if link is None else f", stretched to {link['gb_per_s']:g} GB/s + {link['latency_us']:g} µs (emulated)"
    )
    lines = [
        f"model      {model['path']} ({model['type']}, {model['dtype']}): {model['layers']} layers, "
        f"{model['sparse_layers']} of them sparse",
        f"experts    {experts['total']}, {experts['per_token']} per token, {experts['shared']} shared; "
        f"{counts} on each of {len(experts['by_rank'])} rank{'s' * (len(experts['by_rank']) > 1)}",
        f"transport  {found['transport']}{stretched}",
    ]
    if found["num_ubatches"] == 1:
        return [*lines, "overlap    off: every step runs whole (--enable-dbo splits steps in two ubatches)"]
    forced = f", every step: {FORCE_SPLIT.name} is set" if found["is_forced"] else ""
    lines.append(f"overlap    {found['num_ubatches']} ubatches take turns ({found['executor']}){forced}")
    for phase, runs in found["splits"].items():
        what = "steps of decodes only   " if phase == "decode" else "steps with prompt tokens"
        sizes = ", ".join(f"{run['tokens'][0]}–{run['tokens'][1]}: {run['reason']}" for run in runs)
        lines.append(f"  {what}  tokens per rank {sizes}")
    if not any(run["reason"] == "split" for runs in found["splits"].values() for run in runs):
        how = "lower the thresholds, or raise --max-num-batched-tokens or --max-num-seqs"
        return [*lines, f"  no step can be split: {how}"]
    for name, phases in _by_schedule(found["schedules"]).items():
        lines += ["", f"one sparse layer in {' and '.join(phases)} ({name})", *_picture(found["schedules"][phases[0]])]
    lines += ["", "A0 qkv projection, A1 attention and router, D dispatch, M experts, C combine, S shared experts;"]
    return [*lines, "the number: the ubatch; ⁺: of the next layer. Each transfer runs under the compute above it."]


def _by_schedule(schedules: dict[str, Any]) -> dict[str, list[str]]:
    phases: dict[str, list[str]] = {}
    for phase, one in schedules.items():
        phases.setdefault(one["name"], []).append(phase)
    return phases


def _picture(one: dict[str, Any]) -> list[str]:
    """The two lanes side by side, a column per transfer."""
    cells = [(" ".join(lane["compute"]), lane["comm"]) for lane in one["lanes"]]
    widths = [max(map(len, pair)) for pair in cells]
    rows = []
    for lane, at in (("compute", 0), ("comm", 1)):
        rows.append(f"  {lane:<8}│ " + " │ ".join(f"{c[at]:<{w}}" for c, w in zip(cells, widths, strict=True)) + " │")
    return [*rows, f"  launched  {', '.join(one['order'])}"]
