"""A probe: one rank of those that move bytes as the engine's ranks do, and time it. Knows no model.

What arrives is checked: some machines pass peers' memory on wrongly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.bench.report import spread
from hocket.dist import collectives
from hocket.dist.world import Place, World
from hocket.doctor.child import Task
from hocket.errors import HocketError

SIZES = {"cpu": (4 << 10, 16 << 20), "cuda": (64 << 10, 128 << 20)}
"""Bytes that a rank ends up with: few for the latency, many for the bandwidth."""
_REPEATS = 5
_NUM_CALLS = 20
"""That are timed together on a GPU, and of messages of few bytes."""
_FEW_BYTES = 1 << 20


def probe(task: Task) -> None:
    """Rank 0 reports for each transfer and size {op, ranks, bytes, us, gb_per_s}. arguments: device, limit_s.

    bytes: that a rank gets from others. us: per call, spread over repeats. gb_per_s: at the median.
    """
    place = Place.spawned(task.index, task.count, f"{task.folder}/store")
    device = place.device(task.arguments["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit_s = task.arguments["limit_s"]
    task.at("joining the group of ranks")
    world = World(place, limit_s)
    world.join()
    mesh = world.mesh(expert_parallel=True, device=device, step_timeout_s=limit_s)
    for name, move in (("all-to-all", _all_to_all), ("all-gather", _all_gather)):
        for num_bytes in SIZES[device.type]:
            task.at(f"{name} of {num_bytes >> 10:,} KiB over {task.count} ranks")
            part = num_bytes // 4 // task.count
            us = move(part, place.rank, task.count, mesh.ep_group, device)
            if place.rank == 0:
                task.found(figures(part * 4 * (task.count - 1), us) | {"op": name, "ranks": task.count})
    task.at("leaving the group of ranks")
    world.close()


def figures(num_bytes: int, us: list[float]) -> dict[str, Any]:
    """{bytes, us, gb_per_s} of one transfer."""
    times = spread(us)
    return {"bytes": num_bytes, "us": times, "gb_per_s": num_bytes / times["median"] / 1e3}


def timed(call: Callable[[], object], num_bytes: int, device: torch.device) -> list[float]:
    """µs per call, once for each repeat, by the host's clock; on a GPU queued calls are waited for at the end."""
    num_calls = _NUM_CALLS if device.type == "cuda" or num_bytes <= _FEW_BYTES else 1
    found = []
    for repeat in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:  # the first warms up
            found.append((time.perf_counter() - started) / num_calls * 1e6)
    return found


def _all_to_all(part: int, rank: int, count: int, group: collectives.Group | None, device: torch.device) -> list[float]:
    """part: elements for each rank; they carry the sender's number."""
    sent = torch.full((count * part,), float(rank), device=device)
    return _checked(collectives.all_to_all, sent, torch.empty_like(sent), count, group)


def _all_gather(part: int, rank: int, count: int, group: collectives.Group | None, device: torch.device) -> list[float]:
    sent = torch.full((part,), float(rank), device=device)
    return _checked(collectives.all_gather, sent, sent.new_empty(count * part), count, group)


def _checked(
    move: Callable[[Tensor, Tensor, collectives.Group | None], None],
    sent: Tensor,
    got: Tensor,
    count: int,
    group: collectives.Group | None,
) -> list[float]:
    us = timed(lambda: move(got, sent, group), got.nbytes, got.device)
    senders = torch.arange(count, device=got.device)[:, None]
    wrong = (got.view(count, -1) != senders).sum(dim=1).tolist()
    if any(wrong):
        raise HocketError(f"wrong numbers arrived: {wrong} of {got.numel() // count} from rank 0 to {count - 1}")
    return us
