"""Faults of transfers while ubatches alternate, to plant in running ranks. For tests only; see `overlap_faults`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from faults import Plant, model_of
from model_faults import moe_layers
from torch import Tensor

from hocket.engine import Engine
from hocket.errors import BatonTimeout
from hocket.moe.transport.base import Dispatched
from hocket.trace.spans import Stage
from hocket.ubatch import lanes
from hocket.ubatch.context import current
from hocket.ubatch.lanes import Pending, Work, WorkerLane
from hocket.ubatch.transfer import Running, Transfer

MOCKS = ExitStack()
"""What is replaced until the next engine is built."""


def mocked(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a module or class until the next engine is built."""
    MOCKS.enter_context(mock.patch.object(owner, name, value))


def ubatch_idx() -> int | None:
    """Which ubatch is running; None where the step is not split."""
    context = current()
    return context.idx if context is not None and len(context.peers) > 1 else None


# -- transports -----------------------------------------------------------------------------------------------------


def transports(engine: Engine) -> list[Any]:
    found: dict[int, Any] = {id(layer.transport): layer.transport for layer in moe_layers(model_of(engine))}
    return list(found.values())


def change_dispatch(change: Callable[[Any, Transfer[Dispatched]], Transfer[Dispatched]]) -> Plant:
    """In ubatches each dispatch becomes `change(state of this transport, the right one)`."""
    return _change("prepare", change)


def change_combine(change: Callable[[Any, Transfer[Tensor]], Transfer[Tensor]]) -> Plant:
    return _change("finalize", change)


def _change(name: str, change: Callable[[dict[str, Any], Any], Any]) -> Plant:
    def plant(engine: Engine) -> None:
        for transport in transports(engine):
            real, state = getattr(transport, name), {"rank": engine.mesh.rank}

            def changed(*args: Any, real: Any = real, state: dict[str, Any] = state) -> Any:
                return change(state, real(*args)) if ubatch_idx() is not None else real(*args)

            setattr(transport, name, changed)

    return plant


def latest_result(state: dict[str, Any], transfer: Transfer[Any]) -> Transfer[Any]:
    """What was received is kept on the transport, where the other ubatch's next transfer overwrites it."""
    state["latest"] = transfer
    return dataclasses.replace(transfer, result=lambda: state["latest"].result())


def weigh_twice(state: dict[str, Any], transfer: Transfer[Dispatched]) -> Transfer[Dispatched]:
    def result() -> Dispatched:
        sent = transfer.result()
        return dataclasses.replace(sent, weights=sent.weights * sent.weights)

    return dataclasses.replace(transfer, result=result)


def compute_dropped(engine: Engine) -> None:
    """In ubatches slots of no expert here are taken for the first one's."""
    for layer in moe_layers(model_of(engine)):
        real = layer.experts.local_ids

        def changed(ids: Tensor, real: Callable[[Tensor], Tensor] = real) -> Tensor:
            return real(ids).clamp_min(0) if ubatch_idx() is not None else real(ids)

        layer.experts.local_ids = changed  # type: ignore[method-assign]


def add_twice(state: dict[str, Any], transfer: Transfer[Tensor]) -> Transfer[Tensor]:
    return dataclasses.replace(transfer, result=lambda: transfer.result() * 2)


def lose_second(state: dict[str, Any], transfer: Transfer[Tensor]) -> Transfer[Tensor]:
    """The second ubatch gets zeros for what its tokens' experts computed."""
    return dataclasses.replace(transfer, result=lambda: transfer.result() * (ubatch_idx() != 1))


def keep_padding(engine: Engine) -> None:
    """Combine returns as many rows as the largest rank has."""
    for transport in transports(engine):
        finalize = transport.finalize

        def padded(out: Tensor, handle: Any, finalize: Any = finalize) -> Any:
            if ubatch_idx() is not None:
                handle = dataclasses.replace(handle, num_rows=handle.num_padded_max)
            return finalize(out, handle)

        transport.finalize = padded


# -- receive hooks --------------------------------------------------------------------------------------------------


def receive_apart(engine: Engine) -> None:
    """All of a transfer happens in its receive. (Not a fault: there are such transports.)"""
    for transport in transports(engine):
        for name in ("prepare", "finalize"):
            real = getattr(transport, name)

            def apart(*args: Any, real: Any = real) -> Transfer[Any]:
                transfer = real(*args)
                return dataclasses.replace(transfer, send=lambda: None, receive=transfer.send, num_bytes=lambda: 0)

            setattr(transport, name, apart)


def receive_twice(engine: Engine) -> None:
    """On one rank each receive is launched by the next ubatch and again by its own."""
    receive_apart(engine)
    receive = Running._receive

    def again(running: Running[Any]) -> None:
        is_due = running._receive_is_due
        receive(running)
        if engine.mesh.rank == 1 and ubatch_idx() is not None:
            running._receive_is_due = is_due

    mocked(Running, "_receive", again)


def receive_never(engine: Engine) -> None:
    receive_apart(engine)
    receive = Running._receive
    mocked(Running, "_receive", lambda running: None if ubatch_idx() is not None else receive(running))


# -- when a transfer may start --------------------------------------------------------------------------------------


def late_events(engine: Engine) -> None:
    """In ubatches the event that a transfer waits for is recorded behind the hand-over, not before: so it also holds
    what the next ubatch computes meanwhile, and the transfer runs after that instead of under it. (No answer is wrong.)

    Where a lane is a thread, the event is one of threads, set when its ubatch goes on; a job waits for it before it
    looks at the clock, as a stream does before a kernel.
    """
    launch, hand_over, finish = WorkerLane.launch, Running.hand_over, Running.finish
    events: dict[int | None, list[threading.Event]] = {}

    def launch_late(lane: WorkerLane, work: Work, name: str, after: Any = None) -> Pending:
        if ubatch_idx() is None or not name.endswith(" send"):
            return launch(lane, work, name, after)
        event = threading.Event()
        events.setdefault(ubatch_idx(), []).append(event)
        job: Any = lanes._Job(work, name, lane._timeout_s)
        run = job.run
        job.run = lambda broken: run(broken if event.wait(lane._timeout_s) else BatonTimeout("never recorded"))
        lane._jobs.put(job)
        return job  # type: ignore[no-any-return]

    def record() -> None:
        for event in events.pop(ubatch_idx(), ()):
            event.set()

    def hand_over_first(running: Running[Any]) -> None:
        hand_over(running)
        record()

    def finish_at_last(running: Running[Any], then: Stage) -> Any:
        record()
        return finish(running, then)

    mocked(WorkerLane, "launch", launch_late)
    mocked(Running, "hand_over", hand_over_first)
    mocked(Running, "finish", finish_at_last)


TRANSFER_FAULTS: dict[str, Plant] = {
    "dispatch received into a shared buffer": change_dispatch(latest_result),
    "combine received into a shared buffer": change_combine(latest_result),
    "weights applied twice": change_dispatch(weigh_twice),
    "dropped slots computed": compute_dropped,
    "combine added twice": change_combine(add_twice),
    "combine of the second ubatch lost": change_combine(lose_second),
    "padding rows kept": keep_padding,
    "receive run twice on one rank": receive_twice,
    "receive never run": receive_never,
}
