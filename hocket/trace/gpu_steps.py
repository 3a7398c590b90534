"""Recorded steps of a GPU with the times of its kernels, from a profile. A pure function; knows no profiler, no engine.

Before and behind each step lies a mark, a kernel with a name of its own. The event behind the first one says when it
ended by the clock of the step's spans, so all kernels can be put on that clock.

A step that ran stage by stage has spans already, by events that lie between launches: they say which stage a kernel is
of, and gaps between kernels are theirs no more. A replay of a CUDA graph has none: its kernels stand for themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hocket.trace.gpu_intervals import Kernel, told_apart
from hocket.trace.spans import COMM, COMPUTE, KERNELS, HandOver, Span, Stage, Step

MARK = "spin_kernel"
"""Part of the name of the kernel behind `torch.cuda._sleep`, which nothing else here launches."""
NAME_LENGTH = 60


def fill(steps: Sequence[Step], kernels: Sequence[Kernel], num_layers: int) -> bool:
    """Give the marked `steps`, in the order they ran, the times of their kernels; whether the profile has all their
    marks, else they are left as they are. num_layers: sparse layers of the model."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_ns)
    marks = [kernel for kernel in ordered if MARK in kernel.name]
    if len(marks) != 2 * len(steps):
        return False
    for step, before, behind in zip(steps, marks[::2], marks[1::2], strict=True):
        if step.stop_ns:
            inside = [one for one in ordered if before.stop_ns <= one.start_ns and one.stop_ns <= behind.stop_ns]
            shift = step.start_ns - before.stop_ns
            _fill(step, [_moved(one, shift) for one in inside if MARK not in one.name], num_layers)
    return True


def _moved(kernel: Kernel, shift: int) -> Kernel:
    return Kernel(kernel.name, kernel.stream, kernel.start_ns + shift, kernel.stop_ns + shift)


def _fill(step: Step, kernels: list[Kernel], num_layers: int) -> None:
    comm, compute = told_apart(kernels)
    sent = [span for span in step.spans if span.lane == COMM and span.part != "flight"]
    computed = [span for span in step.spans if span.lane == COMPUTE]
    if computed:
        moving, computing = _named(comm, COMM, sent or computed), _named(compute, COMPUTE, computed)
        flights = _flights(moving)
    else:
        moving, computing = _by_layer(comm, compute, num_layers)
        flights = [replace(one, part="flight") for one in _apart(moving)]
    computing = _apart(computing)
    step.spans = computing + _apart(moving) + flights
    step.hand_overs = [
        HandOver(one.ubatch, other.ubatch, one.stop_ns, other.start_ns)
        for one, other in pairwise(computing)
        if one.ubatch != other.ubatch
    ]
    step.source = KERNELS


def _named(kernels: list[Kernel], lane: str, spans: list[Span]) -> list[Span]:
    """A span for each kernel, called as the one of `spans` that it lies in, or nearest to: clocks that are compared by
    one event differ by a microsecond or two."""
    spans = sorted(spans, key=lambda span: span.start_ns)
    starts = [span.start_ns for span in spans]
    found = []
    for kernel in kernels:
        middle = (kernel.start_ns + kernel.stop_ns) // 2
        after = bisect_right(starts, middle)
        near = spans[max(after - 1, 0) : after + 1]
        one = min(near, key=lambda span: max(span.start_ns - middle, middle - span.stop_ns, 0))
        part = one.part if lane == COMM else ""
        found.append(_span(kernel, lane, one.layer, one.stage, one.ubatch, part))
    return found


def _span(kernel: Kernel, lane: str, layer: int, stage: Stage, ubatch: int = 0, part: str = "") -> Span:
    name = kernel.name[:NAME_LENGTH]
    return Span(lane, ubatch, layer, stage, part, kernel.start_ns, kernel.stop_ns, name)


def _flights(sent: list[Span]) -> list[Span]:
    """Of each transfer, from its first kernel's start to its last one's end: between the two data may be under way
    without a kernel."""
    found: dict[tuple[int, int, Stage], Span] = {}
    for span in sent:
        key = span.ubatch, span.layer, span.stage
        flight = found.setdefault(key, Span(COMM, *key, "flight", span.start_ns, span.stop_ns))
        flight.start_ns, flight.stop_ns = min(flight.start_ns, span.start_ns), max(flight.stop_ns, span.stop_ns)
    return list(found.values())


def _by_layer(comm: list[Kernel], compute: list[Kernel], num_layers: int) -> tuple[list[Span], list[Span]]:
    """Of a graph: layers can be told where each has as many kernels of communication; else all are of layer 0."""
    each = len(comm) // num_layers if num_layers and len(comm) % num_layers == 0 else len(comm)
    moving = [_span(one, COMM, number // each, Stage.KERNEL) for number, one in enumerate(comm)]
    ends = [span.stop_ns for span in moving[each - 1 :: each]] if each else []
    last = max(len(ends) - 1, 0)
    layers = [min(bisect_right(ends, kernel.start_ns), last) for kernel in compute]
    return moving, [_span(one, COMPUTE, layer, Stage.KERNEL) for one, layer in zip(compute, layers, strict=True)]


def _apart(spans: list[Span]) -> list[Span]:
    """The same without what another one covers already: a kernel may begin before the one before it has ended."""
    found: list[Span] = []
    until = 0
    for span in spans:
        start = max(span.start_ns, until)
        if span.stop_ns > start:
            until = span.stop_ns
            found.append(replace(span, start_ns=start))
    return found
