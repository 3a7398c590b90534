"""In which order a split step's transfers and compute are launched, and what hides what: the executor's own schedule.

Knows neither sizes nor costs.
"""

from __future__ import annotations

from typing import Any

from hocket.config.engine import EngineConfig
from hocket.overlap import schedule
from hocket.overlap.schedule import Launch, Schedule
from hocket.trace.spans import Stage


def orders(config: EngineConfig) -> dict[str, Any]:
    """Of each phase: the order of one sparse layer in the steady state, and what hides what."""
    return {phase: _order(config, phase) for phase in schedule.PHASES}


def _order(config: EngineConfig, phase: str) -> dict[str, Any]:
    chosen = _chosen(config, phase)
    order, first = _launches(config, chosen), config.overlap.num_ubatches
    lanes = [
        {"comm": _short(send, first), "compute": [c.text(first) for c in compute]}
        for send, compute in schedule.hidden_under(order)
        if send.layer == first
    ]
    begin, end = (order.index(Launch(Stage.DISPATCH, 0, layer, "send")) for layer in (first, first + 1))
    return {"name": chosen.name, "order": [launch.text(first) for launch in order[begin:end]], "lanes": lanes}


def _chosen(config: EngineConfig, phase: str) -> Schedule:
    """As the executor chooses, by the lane that transfers run on."""
    from hocket.moe.transport.registry import transport_class
    from hocket.ubatch.lanes import WorkerLane
    from hocket.ubatch.stream_lane import StreamLane

    lane = WorkerLane if config.device == "cpu" else StreamLane
    launch_blocks = transport_class(config.parallel.all2all_backend).launch_blocks
    return schedule.choose(phase, launch_blocks=launch_blocks, has_own_thread=lane.has_own_thread)


def _launches(config: EngineConfig, chosen: Schedule) -> list[Launch]:
    """Those of some layers, of which number `num_ubatches` and the next are in the steady state."""
    from hocket.moe.transport.link_emulator import LinkEmulator
    from hocket.moe.transport.registry import transport_class

    emulated = config.parallel.emulated_link is not None
    transport = LinkEmulator if emulated else transport_class(config.parallel.all2all_backend)
    return schedule.launch_order(
        chosen,
        num_ubatches=config.overlap.num_ubatches,
        num_layers=config.overlap.num_ubatches + 3,
        is_apart=transport.is_apart,
        has_shared=config.model.moe.num_shared_experts > 0,
    )


def _short(send: Launch, first: int) -> str:
    return send.text(first).removesuffix(" send")


def by_schedule(found: dict[str, Any]) -> dict[str, list[str]]:
    """Phases by the name of their schedule."""
    phases: dict[str, list[str]] = {}
    for phase, one in found.items():
        phases.setdefault(one["name"], []).append(phase)
    return phases


def picture(one: dict[str, Any]) -> list[str]:
    """The two lanes side by side, a column per transfer."""
    cells = [(" ".join(lane["compute"]), lane["comm"]) for lane in one["lanes"]]
    widths = [max(map(len, pair)) for pair in cells]
    rows = []
    for lane, at in (("compute", 0), ("comm", 1)):
        rows.append(f"{lane:<8}│ " + " │ ".join(f"{c[at]:<{w}}" for c, w in zip(cells, widths, strict=True)) + " │")
    return [*rows, f"launched  {', '.join(one['order'])}"]
