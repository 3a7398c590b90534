"""A trace of ranks whose clocks differ by seconds: their lanes are put together as they ran."""

from __future__ import annotations

import re

from other_clock import AHEAD_NS
from patched_ranks import patched_ranks

from hocket.bench.trace import Workload, record
from hocket.config.options import Options
from hocket.trace.spans import Span, Stage


def dispatch(spans: list[Span]) -> Span:
    """The first one, under way: no rank's ends before every rank's has begun."""
    return next(span for span in spans if span.part == "flight" and span.stage is Stage.DISPATCH)


def test_lanes_of_two_clocks() -> None:
    options = Options.from_dict({"model": "tiny", "data_parallel_size": 2, "enable_expert_parallel": True})
    work = Workload(phase="prefill", num_steps=4, prompt_len=48)
    with patched_ranks(2, "other_clock:install") as group:
        recording = record(options, work, group=group)
    (note,) = recording.notes
    found = re.fullmatch(r"rank 1 on another host, whose clock is known to ±([\d,]+) µs by the step exchange", note)
    assert found, note
    error_ns = 1_000 * (1 + int(found[1].replace(",", "")))
    assert error_ns < AHEAD_NS / 5
    for one, other in zip(*recording.ranks, strict=True):
        assert abs(one.exchange_ns[1] - other.exchange_ns[1]) > AHEAD_NS / 2, "as they said it themselves"
        first, second = dispatch(one.spans), dispatch(other.spans)
        assert max(first.start_ns, second.start_ns) <= min(first.stop_ns, second.stop_ns) + error_ns
