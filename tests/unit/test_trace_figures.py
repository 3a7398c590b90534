"""Figures from spans, against an independent count over single nanoseconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hocket.trace.figures import comm_figures
from hocket.trace.spans import COMM, COMPUTE, Span, Stage

intervals = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(intervals, max_size=6), st.lists(intervals, max_size=6))
def test_hidden_and_exposed(flights: list[tuple[int, int]], compute: list[tuple[int, int]]) -> None:
    spans = [Span(COMM, 0, 0, Stage.DISPATCH, "flight", *part) for part in flights]
    spans += [Span(COMPUTE, 0, 0, Stage.EXPERTS, "", *part) for part in compute]
    spans.append(Span(COMM, 0, 0, Stage.DISPATCH, "send", 0, 100))  # the lane's own time is no flight
    figures = comm_figures(spans)
    under_way = {ns for start, stop in flights for ns in range(start, stop)}
    computing = {ns for start, stop in compute for ns in range(start, stop)}
    assert figures.comm_ns == len(under_way)
    assert figures.hidden_ns == len(under_way & computing)
    assert figures.exposed_ns == len(under_way - computing)
