"""How long a start took: phases from real clocks, the slowest rank's, and a line whose parts are the whole."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from hocket.startup import GRAPHS, KV_CACHE, PROCESSES, RENDEZVOUS, WEIGHTS, Phases, StartUp, process_began

QUICK = {PROCESSES: 2.0, RENDEZVOUS: 6.0, WEIGHTS: 1.0, KV_CACHE: 20.0, GRAPHS: 3.0}
SLOW = {PROCESSES: 3.0, RENDEZVOUS: 5.0, WEIGHTS: 20.0, KV_CACHE: 1.0, GRAPHS: 3.0}


def test_phases_follow_each_other_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    phases = Phases()
    phases.end("first")
    phases.end("second")
    assert phases.seconds == {"first": 2.5, "second": 0.5}


def test_a_process_knows_when_it_began() -> None:
    code = "import time\nfrom hocket.startup import process_began\nprint(time.perf_counter() - process_began())"
    began = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    whole = time.perf_counter() - began
    assert 0.0 < float(out) < whole + 0.02  # the system's clock ticks every 10 ms
    assert process_began() <= began


def test_the_slowest_rank_is_the_one_that_others_wait_for() -> None:
    startup = StartUp(began=100.0, ready=133.0, front_s=0.75, ranks=[QUICK, SLOW])
    assert startup.slowest == 1
    assert startup.seconds() == {"front": 0.75, "waiting": 0.25, **SLOW}
    line = startup.line(process_began=98.5, now=133.5)
    assert line == (
        "start-up 35.0 s: imports 1.5, front 0.8, waiting 0.2, processes 3.0, rendezvous 5.0, weights 20.0, "
        "KV cache 1.0, graphs 3.0, server 0.5 (of ranks the slowest, 1)"
    )


def test_the_parts_are_the_whole_and_one_rank_is_not_named() -> None:
    line = StartUp(began=5.0, ready=37.0, front_s=0.0, ranks=[SLOW]).line(process_began=4.0, now=37.5)
    total, *parts = (float(number) for number in re.findall(r"\d+\.\d", line))
    assert total == pytest.approx(sum(parts), abs=0.05 * len(parts))
    assert "slowest" not in line


def test_the_slowest_rank_is_named_by_its_number_among_all() -> None:
    startup = StartUp(began=0.0, ready=40.0, front_s=0.0, ranks=[QUICK, SLOW], first_rank=6)
    assert startup.line(process_began=0.0, now=40.0).endswith("(of ranks the slowest, 7)")
