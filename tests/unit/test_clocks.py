"""Steps of hosts with clocks of their own on one clock: the bounds hold whoever comes late, and pages say how good."""

from __future__ import annotations

import copy
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trace_files import made_step

from hocket.trace import clocks, page, perfetto, picture
from hocket.trace.recording import NO_COMM, Recording, recording_of
from hocket.trace.spans import COMPUTE, HandOver, Recorder, Span, Stage, Step

US = 1000
LATENCY_US = 40


def run(arrivals_us: list[list[int]], offsets_us: list[int]) -> list[list[Step]]:
    """By rank, steps as they are recorded by clocks that run ahead by `offsets_us`. Each lasts 500 µs; arrivals_us: by
    step and rank, how late a rank comes to the exchange before it, which takes LATENCY_US after the last one."""
    ranks: list[list[Step]] = [[] for _ in offsets_us]
    for number, late in enumerate(arrivals_us):
        at = 10_000 + 1_000 * number
        left = at + max(late) + LATENCY_US
        for rank, offset in enumerate(offsets_us):
            start = (left + offset) * US
            step = Step("prefill", 2, 64, start, start + 500 * US, clock=f"clock {offset}", number=number)
            step.spans.append(Span(COMPUTE, 0, 0, Stage.EXPERTS, "", start, start + 9 * US))
            step.hand_overs.append(HandOver(0, 1, start + 9 * US, start + 10 * US))
            step.exchange_ns = (at + late[rank] + offset) * US, (left + offset) * US
            ranks[rank].append(step)
    return ranks


lateness = st.lists(st.lists(st.integers(0, 300), min_size=4, max_size=4), min_size=1, max_size=6)


@given(lateness, st.integers(-(10**9), 10**9))
def test_right_within_the_error_that_is_stated(arrivals_us: list[list[int]], offset_us: int) -> None:
    """Two hosts of two ranks each: whatever the second one's clock says."""
    ranks = run(arrivals_us, [0, 0, offset_us or 1, offset_us or 1])
    truth = [[copy.deepcopy(step) for step in steps] for steps in run(arrivals_us, [0, 0, 0, 0])]
    (said,) = clocks.align(ranks)
    error_us = float(re.search(r"±([\d,]+) µs", said).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert said.startswith("rank 2, 3 on another host")
    for steps, others in zip(ranks, truth, strict=True):
        for step, other in zip(steps, others, strict=True):
            assert abs(step.start_ns - other.start_ns) <= (error_us + 1) * US
            (span,), (hand_over,) = step.spans, step.hand_overs
            assert (span.start_ns, span.stop_ns) == (step.start_ns, step.start_ns + 9 * US), "all of it moves alike"
            assert hand_over.stop_ns == step.start_ns + 10 * US


def test_each_coming_last_once_leaves_half_a_round_trip() -> None:
    ranks = run([[0, 200], [200, 0]], [0, 7_000_000])
    assert clocks.align(ranks) == ["rank 1 on another host, whose clock is known to ±40 µs by the step exchange"]
    assert ranks[1][0].start_ns == pytest.approx(ranks[0][0].start_ns, abs=US)


def test_one_host_is_left_alone() -> None:
    ranks = run([[0, 5]], [3, 3])
    before = copy.deepcopy(ranks)
    assert clocks.align(ranks) == []
    assert ranks == before
    assert Recorder().clock == Recorder().clock != ""


def texts_of(recording: Recording) -> list[str]:
    out = io.StringIO()
    picture.show(recording, picture.console(file=out))
    return [page.page({"": recording}), out.getvalue()]


def test_pages_say_how_good_it_is() -> None:
    recording = recording_of({"title": "made"}, run([[0, 200], [200, 0]], [0, 50]), moves=True)
    for text in texts_of(recording):
        assert "rank 1 on another host, whose clock is known to ±40 µs by the step exchange" in text


def test_steps_are_those_that_all_ranks_have() -> None:
    """Ranks that work are told to record at different times."""
    ranks = run([[0, 0]] * 4, [0, 50])
    recording = recording_of({}, [ranks[0][:3], ranks[1][1:]], moves=True)
    assert [[step.number for step in steps] for steps in recording.ranks] == [[1, 2], [1, 2]]


def test_without_expert_parallelism_nothing_moves() -> None:
    """What its layers call transfers is no communication: no lane, no figures of it, and a line that says so."""
    ranks = [[made_step(5_000_000)], [made_step(5_000_010), made_step(5_001_000)]]
    ranks[0][0].clock, ranks[1][0].clock = "one", "another"
    recording = recording_of({"title": "replicas"}, ranks, moves=False)
    assert recording.notes[0] == NO_COMM
    assert "lanes of different hosts are not aligned" in recording.notes[1]
    (figures, _) = recording.figures()
    assert (figures.comm_ns, figures.exposed_ns) == (0, 0)
    assert figures.compute_ns > 0
    html, text = texts_of(recording)
    for shown in (html, text):
        assert NO_COMM in shown
        assert "lanes of different hosts are not aligned" in shown
    for word in ("comm ", "exposed", "hidden"):
        assert word not in text.replace(NO_COMM, "")
    assert '["exposed","exposed"' not in html
    events = perfetto.events(recording)
    assert not [event for event in events if event["ph"] == "X" and event["cat"] in ("comm", "flight", "exposed")]
