"""One rank of the layer benchmark: times a sparse layer's parts. Knows nothing of the other ranks' figures.

python -m hocket.bench.layer_rank FOLDER RANK       started by `layer.py`, which wrote its orders into FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from hocket.bench.layer import PARTS, Measured, Orders
from hocket.bench.report import runs_in_fp8
from hocket.config.engine import EngineConfig
from hocket.dist.mesh import Mesh
from hocket.dist.world import Place, World
from hocket.errors import HocketError
from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.ubatch.transfer import Transfer
from hocket.worker.capture import GraphPool, unlimited
from hocket.worker.runner import Runner

Work = Callable[[], object]
T = TypeVar("T")


def main(folder: str, rank: int) -> int:
    """Exit code 0: the figures are in FOLDER/rank-RANK; 1: the last line of standard error says why not."""
    try:
        orders = msgspec.msgpack.decode(Path(folder, "orders").read_bytes(), type=Orders)
        first = orders.configs[0]
        place = Place.spawned(rank, orders.world_size, os.path.join(folder, "store"))
        device = place.device(first.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world = World(place, first.startup_timeout_s)
        world.join()
        mesh = world.mesh(
            expert_parallel=first.parallel.enable_expert_parallel,
            device=device,
            step_timeout_s=first.step_timeout_s,
            max_ctas=first.parallel.max_nccl_ctas,
        )
        with torch.inference_mode():
            found = measure(orders, mesh)
        Path(folder, f"rank-{rank}").write_bytes(msgspec.msgpack.encode(found))
        if device.type == "cuda":
            os._exit(0)  # a group that graphs were captured of is not taken down reliably
        world.close()
    except Exception as error:  # the one place where it becomes a line for the front
        text = str(error) if isinstance(error, HocketError) else f"{type(error).__name__}: {error}"
        print(" ".join(text.split()), file=sys.stderr, flush=True)
        os._exit(1)  # others may be inside a collective with this rank: leave without waiting for them
    return 0


def measure(orders: Orders, mesh: Mesh) -> list[Measured]:
    """Every configuration at every number of tokens, in turn, `repeats` times after one round to warm up."""
    cells = []
    for config_idx, config in enumerate(orders.configs):
        runner = Runner(config, mesh, lambda phase, done, total: None, unlimited)
        layer = runner.model.layers[0].mlp
        assert isinstance(layer, MoELayer)
        for tokens in orders.tokens_per_gpu:
            timers, eager = _timers(layer, config, tokens, orders, mesh.device)
            us: dict[str, list[float]] = {part: [] for part in PARTS}
            info = runner.info()
            found = Measured(config_idx, tokens, us, info["moe_backend"], eager, runs_in_fp8(info))
            cells.append((found, timers))
    for repeat in range(orders.repeats + 1):
        for found, timers in cells:
            for part, timer in timers.items():
                value = timer()
                if repeat:
                    found.us[part].append(value)
    return [found for found, _ in cells]


def _timers(
    layer: MoELayer, config: EngineConfig, tokens: int, orders: Orders, device: torch.device
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """By part, what measures µs of one call; and the parts that run without a graph."""
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, config.model.hidden_size, generator=generator, device=device)
    x = x.to(getattr(torch, config.dtype))
    layout = TokenLayout.of(tokens, tokens, tokens, device)
    weights, ids = layer.router(x)
    sent = _moved(layer.transport.prepare(x, ids, weights, layout))
    out = sent.through(layer.experts)
    _moved(layer.transport.finalize(out, sent.handle))  # transports with two areas alternate: whole pairs keep step
    work: dict[str, Work] = {
        "router": lambda: layer.router(x),
        "dispatch": lambda: _moved(layer.transport.prepare(x, ids, weights, layout)),
        "experts": lambda: sent.through(layer.experts),
        "combine": lambda: _moved(layer.transport.finalize(out, sent.handle)),
        "layer": lambda: layer(x, layout),
    }
    rounds = orders.rounds + orders.rounds % 2
    if device.type == "cpu":
        return {part: _on_clock(call, rounds) for part, call in work.items()}, list(work)
    eager = _not_captured(layer) if orders.use_graphs else list(PARTS)
    timers: dict[str, Callable[[], float]] = {}
    for part, call in work.items():
        calls = partial(_repeat, call, rounds)
        replay = calls if part in eager else GraphPool().capture(calls).replay
        timers[part] = _by_events(replay, rounds)
    return timers, eager


def _not_captured(layer: MoELayer) -> list[str]:
    """The parts that a CUDA graph cannot hold, as their backends say."""
    parts = ["experts"] if not layer.experts.captures else []
    if not layer.transport.captures:
        parts += ["dispatch", "combine"]
    return [*parts, "layer"] if parts else []


def _moved(transfer: Transfer[T]) -> T:
    """All of a transfer at once, as where nothing overlaps."""
    transfer.send()
    if transfer.receive is not None:
        transfer.receive()
    return transfer.result()


def _repeat(call: Work, rounds: int) -> None:
    for _ in range(rounds):
        call()


def _on_clock(call: Work, rounds: int) -> Callable[[], float]:
    def us() -> float:
        call()  # ranks meet here, so that nobody's late start is counted
        started = time.perf_counter()
        _repeat(call, rounds)
        return (time.perf_counter() - started) / rounds * 1e6

    return us


def _by_events(replay: Work, rounds: int) -> Callable[[], float]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def us() -> float:
        replay()
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / rounds * 1e3

    return us


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
