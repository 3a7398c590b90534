"""Makes ranks write down which thread calls which collective on which process group. For tests only.

Each call is a line "group thread function" in SPY_FOLDER/rank-pid; "wrong" in SPY_FAULT makes the main thread use the
experts' group as well, which the test must notice.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket.dist import world
from hocket.engine import Engine

SPY_FOLDER, SPY_FAULT = "SPY_FOLDER", "SPY_FAULT"
FUNCTIONS = (
    "all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter", "send", "recv", "isend", "irecv",
)  # fmt: skip


def install() -> None:
    path = Path(os.environ[SPY_FOLDER]) / str(os.getpid())
    for name in FUNCTIONS:
        setattr(dist, name, spied(getattr(dist, name), name, path))
    connect = world.listen

    def listen(address: str) -> Any:
        note(path, "exchange-socket", "listen")
        return connect(address)

    world.listen = listen
    step = Engine.step

    def step_and_note(self: Engine) -> Any:
        found = step(self)
        if os.environ.get(SPY_FAULT) == "wrong":
            dist.all_reduce(torch.zeros(1), group=self.mesh.ep_group)
        return found

    Engine.step = step_and_note  # type: ignore[method-assign]


def spied(function: Any, name: str, path: Path) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        note(path, "default" if group is None else group.group_name, name)
        return function(*args, **kwargs)

    return call


def note(path: Path, group: str, name: str) -> None:
    with path.open("a") as file:
        file.write(f"{group} {threading.current_thread().name} {name}\n")
