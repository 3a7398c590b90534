"""The comm lane of a GPU: one stream beside the one that computes, for the transfers of all ubatches. Knows nothing of
what they move, and never makes its host wait.

A transfer waits for the event (`mark`) of its inputs, which is recorded when they are launched, not when the transfer
is: between the two another ubatch may have launched compute, under which the transfer is to run. Whoever takes the
result makes the compute stream wait for the transfer's own event.

Memory that both streams use is allocated on the compute stream before the mark, and the call of the sparse layer that a
transfer is of refers to it until `Pending.wait`. That is enough: the allocator gives memory to what is launched on the
compute stream after it is dropped, and that stream has waited for the transfer by then, for all ubatches, which share
it; and whatever read the memory before it was given to the transfer was launched before the mark. So work on this lane
must not allocate what others read, and a wait must come before its result is dropped. Where a library allocates by
itself, what it gave is kept until a later transfer of the same call is sent, behind a mark of the compute that read it.
A step that breaks off between the two ends the process.
"""

from __future__ import annotations

from typing import Any

import torch

from hocket.dist.record import Record
from hocket.ubatch.lanes import Lane, Pending, Work

HIGH_PRIORITY = -2
"""The few thread blocks of a transfer come before the many of compute that are not running yet, also where that is
captured (`worker/capture.py`)."""


class Recorded(Pending):
    """Work on the lane's stream, and the event behind it. The host does not know when it runs, so it has no times."""

    def __init__(self, done: torch.cuda.Event, device: int | None) -> None:
        self._done = done
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


class StreamLane(Lane):
    """Work is launched at once, by the caller and in its thread, under the lane's stream. Work that reads from the GPU
    makes the caller wait: hand over before launching it.

    After a failure the lane is broken: what is launched later fails at once in the same way, so that nobody waits for
    a collective whose peers have gone.

    torch is told the device's number wherever it takes one: to find out which one is current it asks the driver and the
    environment each time, which takes longer than what is asked for.
    """

    has_own_thread = False
    knows_times = False

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        self._device = device.index
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._record = record or Record()
        self._broken: BaseException | None = None

    def mark(self) -> torch.cuda.Event:
        return recorded(torch.cuda.current_stream(self._device))

    def launch(self, work: Work, name: str, after: Any = None) -> Pending:
        if self._broken is not None:
            raise self._broken
        self._record.begin_transfer(name)
        caller = torch.cuda.current_stream(self._device)
        try:
            if after is not None:
                self._stream.wait_event(after)
            torch.cuda.set_stream(self._stream)
            work()
            done = recorded(self._stream)
        except BaseException as error:  # the record stays at the transfer that failed
            self._broken = error
            raise
        finally:
            torch.cuda.set_stream(caller)
        self._record.end_transfer()
        return Recorded(done, self._device)

    def close(self) -> None:
        return None


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what has been launched on the stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
