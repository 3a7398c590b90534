"""Figures from spans, against an independent count over single nanoseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.trace.figures import exposed, step_figures
from hocket.trace.spans import COMM, COMPUTE, HandOver, Span, Stage, Step

intervals = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
several = st.lists(intervals, max_size=6)
Intervals = list[tuple[int, int]]


def spans_of(flights: Intervals, compute: Intervals) -> list[Span]:
    spans = [Span(COMM, 0, 0, Stage.DISPATCH, "flight", *part) for part in flights]
    spans += [Span(COMPUTE, 0, 0, Stage.EXPERTS, "", *part) for part in compute]
    spans.append(Span(COMM, 0, 0, Stage.DISPATCH, "send", 0, 100))  # the lane's own time is no flight
    return spans


def moments(parts: Intervals) -> set[int]:
    return {ns for start, stop in parts for ns in range(start, stop)}


@given(several, several)
def test_hidden_and_exposed(flights: Intervals, compute: Intervals) -> None:
    spans = spans_of(flights, compute)
    figures = step_figures([Step("prefill", 1, 8, 0, 60, spans)])
    under_way, computing = moments(flights), moments(compute)
    assert figures.comm_ns == len(under_way)
    assert figures.hidden_ns == len(under_way & computing)
    assert figures.exposed_ns == len(under_way - computing)
    found = exposed(spans)
    assert moments(found) == under_way - computing
    assert sum(stop - start for start, stop in found) == figures.exposed_ns, "disjoint"
    assert found == sorted(found)


@given(st.lists(st.tuples(several, several), min_size=1, max_size=3))
def test_of_several_steps(parts: list[tuple[Intervals, Intervals]]) -> None:
    steps = []
    for number, (flights, compute) in enumerate(parts):
        hand_overs = [HandOver(0, 1, 5, 5 + number)]
        steps.append(Step("prefill", 2, 8, 0, 60, spans_of(flights, compute), hand_overs))
    figures = step_figures(steps)
    sizes = [(len(moments(flights)), len(moments(compute))) for flights, compute in parts]
    assert figures.compute_ns == sum(compute for _, compute in sizes)
    assert figures.comm_ns == sum(comm for comm, _ in sizes)
    assert figures.stall_ns == sum(60 - compute for _, compute in sizes)
    assert figures.bound_ns == sum(max(pair) for pair in sizes), "the bound is each step's own"
    assert (figures.num_hand_overs, figures.hand_over_ns) == (len(parts), sum(range(len(parts))))
    assert figures.per_step_us()["step"] == pytest.approx(0.060)
    if figures.bound_ns:
        assert figures.over_bound == pytest.approx(60 * len(parts) / figures.bound_ns)
