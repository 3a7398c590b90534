"""What a trace file must hold to be opened by Perfetto, and its figures computed another way. For tests only."""

from __future__ import annotations

import itertools
import math
from typing import Any

Event = dict[str, Any]


def check_events(trace: dict[str, Any]) -> None:
    """Known kinds, named places, times in order, disjoint slices on a thread, arrows from slice to slice."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in timed} <= {"X", "s", "f"}
    assert timed, "something was recorded"
    for event in timed:
        assert (event["pid"], event["tid"]) in names
        assert processes[event["pid"]] == f"rank {event['pid']}"
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert event["name"]
        assert event["cat"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    for rank in processes:
        assert {"compute", "comm"} <= {name for (pid, _), name in names.items() if pid == rank}
    slices: dict[tuple[int, int], list[Event]] = {place: [] for place in names}
    for event in timed:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
    for place, found in slices.items():
        for one, following in itertools.pairwise(found):
            assert one["ts"] + one["dur"] <= following["ts"] + 2e-3, f"slices of {names[place]} overlap"
    _check_arrows([event for event in timed if event["ph"] != "X"], slices)


def _check_arrows(arrows: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    begins = {event["id"]: event for event in arrows if event["ph"] == "s"}
    ends = {event["id"]: event for event in arrows if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(arrows) == 2 * len(begins), "an id is one arrow's"
    for name, begin in begins.items():
        end = ends[name]
        assert end["bp"] == "e", "it ends at the slice that encloses it"
        assert begin["ts"] <= end["ts"]
        touched = [_enclosing(event, slices[event["pid"], event["tid"]]) for event in (begin, end)]
        source, target = (event["args"]["ubatch"] for event in touched)
        assert source != target, "from one ubatch to another"


def _enclosing(event: Event, found: list[Event]) -> Event:
    return next(one for one in found if one["ts"] <= event["ts"] < one["ts"] + one["dur"] and one["cat"] == "compute")


def figures_of(trace: dict[str, Any], rank: int) -> dict[str, float]:
    """Mean µs of a step, by sweeping over the file's raw slices: at each moment, who computes and what is under way."""
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]
    numbers = {event["args"]["step"] for event in slices}
    sums = dict.fromkeys(("step", "compute", "stall", "comm", "hidden", "exposed", "hand_over", "bound"), 0.0)
    for number in numbers:
        mine = [event for event in slices if event["args"]["step"] == number]
        (step,) = (event for event in mine if event["cat"] == "step")
        lanes = [event for event in mine if event["cat"] in ("compute", "flight")]
        edges = sorted({at for event in [step, *lanes] for at in (event["ts"], event["ts"] + event["dur"])})
        own = dict.fromkeys(sums, 0.0)
        for start, stop in itertools.pairwise(edges):
            middle = (start + stop) / 2
            running = {event["cat"] for event in lanes if event["ts"] <= middle < event["ts"] + event["dur"]}
            own["compute"] += (stop - start) * ("compute" in running)
            own["comm"] += (stop - start) * ("flight" in running)
            own["hidden"] += (stop - start) * (running == {"compute", "flight"})
            own["exposed"] += (stop - start) * (running == {"flight"})
        own["step"] = step["dur"]
        own["stall"] = own["step"] - own["compute"]
        own["bound"] = max(own["compute"], own["comm"])
        own["hand_over"] = sum(event["dur"] for event in mine if event["cat"] == "hand-over")
        for name, value in own.items():
            sums[name] += value / len(numbers)
    return sums
