"""Makes a rank do wrong in the middle of a step, when a file says so. For tests only; ranks call `install` at start.

The file PLANT_FILE holds "rank ubatch place what" once (places are joined by "-"). The rank and ubatch named do it in
layer LAYER, where overlap is on in a step that is split: raise; hang; wait (say so in PLANT_FILE.here, then sleep, so
that a signal surely hits in the middle of the step); skip (leave the transfer out; in place "layer" the whole sparse
layer). Place "replay": of ubatch 0, behind the launch of a graph of ubatches.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.engine import Engine
from hocket.models.base import DecoderLayer
from hocket.moe.layer import MoELayer
from hocket.overlap.vote import StepPlan
from hocket.ubatch.context import current
from hocket.ubatch.transfer import Transfer
from hocket.worker.runner import Runner

PLANT_FILE = "PLANT_FILE"
LAYER = 2
HANG_S = 1000.0
WAIT_S = 3.0


def install() -> None:
    build = Engine.__init__

    def build_and_plant(self: Engine, *args: Any) -> None:
        build(self, *args)
        layer = self.runner.model.layers[LAYER]
        assert isinstance(layer, DecoderLayer)
        sparse = layer.mlp
        assert isinstance(sparse, MoELayer)
        plant_in(self, layer.attention, "attention")
        plant_in(self, sparse.router, "router")
        plant_in(self, sparse.experts, "experts")
        if sparse.shared_experts is not None:
            plant_in(self, sparse.shared_experts, "shared")
        plant_skip(self, sparse)
        transport = sparse.transport  # of all layers: the plant is where the first of them gets to it
        transport.prepare = planted_transfers(self, transport.prepare, "dispatch")  # type: ignore[method-assign]
        transport.finalize = planted_transfers(self, transport.finalize, "combine")  # type: ignore[method-assign]

    Engine.__init__ = build_and_plant  # type: ignore[method-assign]
    plant_in_replays()


def planted(engine: Engine, place: str) -> str:
    """What to do here and now, "" if nothing; said once."""
    context = current()
    if context is None or (context.baton.size == 1 and engine.config.overlap.num_ubatches > 1):
        return ""  # the step is not split
    return taken(engine.mesh.rank, context.idx, place)


def taken(rank: int, ubatch: int, place: str) -> str:
    """What the file says for there, "" if nothing; it is said once."""
    path = Path(os.environ[PLANT_FILE])
    try:
        *numbers, where, what = path.read_text().split()
    except (FileNotFoundError, ValueError):  # nothing planted, or another rank has just taken it
        return ""
    if [*map(int, numbers), where] != [rank, ubatch, place]:
        return ""
    path.unlink()
    return what


def do(what: str, place: str) -> None:
    if what == "raise":
        raise ValueError(f"planted in {place}")
    if what == "hang":
        time.sleep(HANG_S)
    if what == "wait":
        Path(os.environ[PLANT_FILE] + ".here").touch()
        time.sleep(WAIT_S)


def plant_in(engine: Engine, module: Any, place: str) -> None:
    forward = module.forward

    def planted_forward(*args: Any, **kwargs: Any) -> Any:
        do(planted(engine, place), place)
        return forward(*args, **kwargs)

    module.forward = planted_forward


def plant_in_replays() -> None:
    launch = Runner.launch

    def launch_and_do(self: Runner, ubatches: Any, batch: Any, plan: StepPlan, before: Any) -> Any:
        found = launch(self, ubatches, batch, plan, before)
        if plan.graph_tokens and plan.num_ubatches > 1:
            do(taken(self.mesh.rank, 0, "replay"), "replay")
        return found

    Runner.launch = launch_and_do  # type: ignore[method-assign]


def plant_skip(engine: Engine, sparse: MoELayer) -> None:
    summands = sparse.summands

    def maybe_skip(x: Any, layout: Any) -> Any:
        return (x, None) if planted(engine, "layer") == "skip" else summands(x, layout)

    sparse.summands = maybe_skip  # type: ignore[method-assign]


def planted_transfers(engine: Engine, make: Callable[..., Transfer[Any]], kind: str) -> Callable[..., Transfer[Any]]:
    def planted_make(*args: Any) -> Transfer[Any]:
        transfer = make(*args)
        what, what_of_recv = planted(engine, f"{kind}-send"), planted(engine, f"{kind}-recv")

        def send() -> None:
            do(what, f"{kind} send")
            if what != "skip":
                transfer.send()

        def receive() -> None:
            do(what_of_recv, f"{kind} recv")
            assert transfer.receive is not None
            transfer.receive()

        return dataclasses.replace(transfer, send=send, receive=None if transfer.receive is None else receive)

    return planted_make
