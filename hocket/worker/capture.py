"""Work in CUDA graphs, and the memory they share. Knows nothing of what is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hocket.errors import CapacityError, HocketError, revive

WARM_UPS = 2
PRIORITY = -1
"""Of the captured stream: before work on a side stream, and behind transfers (`ubatch/stream_lane.py`)."""
TimeLimit = Callable[[str], AbstractContextManager[Any]]
"""Bounds the time of what is done inside; takes what to say when it is over."""
Work = Callable[[], object]


def unlimited(what: str) -> AbstractContextManager[Any]:
    """No bound."""
    return nullcontext(what)


def device_us(work: Work, count: int) -> float:
    """µs of one of `count` times back to back, by the clock of the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


class Captured:
    """A graph of some work. The tensors that the work refers to live as long as it: a replay reads where they lay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        self._graph, self._work = graph, work

    def replay(self) -> None:
        """Put the work on the current stream."""
        self._graph.replay()

    def replay_us(self, count: int) -> float:
        """µs of one of `count` replays back to back, behind another one."""
        self._graph.replay()
        return device_us(self._graph.replay, count)


class GraphPool:
    """Captures graphs of which one runs at a time, so that they share memory: what one leaves free others take.

    For that all are captured on the same stream, as free memory goes back to the stream that it was allocated on.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(priority=PRIORITY)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._reserved_before = torch.cuda.memory_reserved()

    def capture(self, work: Work) -> Captured:
        """`work` in a graph; it runs a few times before: then all it needs is compiled and loaded. It may use other
        streams that wait for the current one first, and that this one waits for at the end. Raises what it raises."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
            self._stream.synchronize()
            graph = self._recorded(work)
        torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph, work)

    def _recorded(self, work: Work) -> torch.cuda.CUDAGraph:
        """The graph of one more run. "thread_local": a capture follows streams, so threads of ubatches launch into it,
        and what other threads do meanwhile, as NCCL's do, does not spoil it."""
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    work()
                except Exception as error:
                    failure = error
        except RuntimeError:  # after some failures a capture cannot even be ended
            if failure is None:
                raise
        if failure is not None:
            raise failure
        return graph

    def taken_bytes(self) -> int:
        """Memory of the device that was reserved since this pool was made, once all that was launched is over."""
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved() - self._reserved_before


@contextmanager
def said_of(what: str, advice: str) -> Iterator[None]:
    """Errors inside come as one line that says what was being captured. advice: what else to change than memory.

    Raises:
        CapacityError: the GPU's memory does not suffice. HocketError: anything else, of the kind that it was.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error) is not None:
            more = f"lower --gpu-memory-utilization or --max-cudagraph-capture-size, or {advice}"
            raise CapacityError(f"{what} takes more memory than the KV cache leaves: {more}") from error
        if isinstance(error, HocketError):
            raise revive(type(error).__name__, f"{what} failed: {_first_line(str(error))}") from error
        raise HocketError(f"{what} failed: {type(error).__name__}: {_first_line(str(error))}; {advice}") from error


def out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """What it comes from, if it is that."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]
