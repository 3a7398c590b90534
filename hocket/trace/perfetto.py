"""A recording as trace events that Perfetto and chrome://tracing open, and back. Knows the format and no engine.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
A process is a rank, its threads are lanes; slices of a thread are disjoint. ts and dur are in µs with three decimals,
which keeps nanoseconds; ts counts from the first step's start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hocket.errors import ConfigError
from hocket.trace.figures import exposed
from hocket.trace.recording import Recording
from hocket.trace.spans import COMM, COMPUTE, HandOver, Span, Stage, Step

KIND, VERSION = "hocket trace", 1
Event = dict[str, Any]
_STEP_TID, _COMPUTE_TID, _COMM_TID, _EXPOSED_TID, _FLIGHT_TID = range(5)
"""The last: of ubatch 0; one for each, for a ubatch has one transfer under way at a time."""


def to_json(recording: Recording) -> dict[str, Any]:
    """The whole file's content. `otherData` holds `about` and the figures, mean of a step in µs by rank."""
    figures = [one.per_step_us() | {"over_bound": one.over_bound} for one in recording.figures()]
    about = {"kind": KIND, "version": VERSION, **recording.about, "figures_us": figures}
    return {"traceEvents": events(recording), "displayTimeUnit": "ms", "otherData": about}


def write(recording: Recording, path: Path) -> None:
    """As JSON. Raises OSError."""
    path.write_text(json.dumps(to_json(recording), ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: str | Path) -> Recording:
    """What `write` wrote.

    Raises:
        ConfigError: it is not such a file, or cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        about = dict(content["otherData"])
        if (about.pop("kind"), about.pop("version")) != (KIND, VERSION):
            raise ValueError("another kind or version")
        about.pop("figures_us")
        ranks = _steps(content["traceEvents"])
        counts = {len(steps) for steps in ranks}
        if len(counts) != 1 or counts == {0}:
            raise ValueError("no steps, or not as many on each rank")
        return Recording(about, ranks)
    except OSError as error:
        raise ConfigError("compare", str(path), f"a file that can be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise ConfigError("compare", str(path), "a JSON trace as hocket trace writes it") from None


def events(recording: Recording) -> list[Event]:
    """Names of processes and threads, then slices and flows by time."""
    base_ns, names, timed = recording.base_ns, list[Event](), list[Event]()
    for rank, steps in enumerate(recording.ranks):
        names += _names(rank, f"rank {recording.first_rank + rank}", recording.num_ubatches)
        for number, step in enumerate(steps):
            timed += _slices(rank, number, step, base_ns)
            timed += _flows(rank, number, step, base_ns)
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return names + timed


def _names(rank: int, title: str, num_ubatches: int) -> list[Event]:
    threads = {_STEP_TID: "steps", _COMPUTE_TID: COMPUTE, _COMM_TID: COMM, _EXPOSED_TID: "exposed communication"}
    threads |= {_FLIGHT_TID + ubatch: f"ub{ubatch} under way" for ubatch in range(num_ubatches)}
    found = [
        _metadata("process_name", rank, 0, name=title),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    for tid, name in threads.items():
        found += [_metadata("thread_name", rank, tid, name=name)]
        found += [_metadata("thread_sort_index", rank, tid, sort_index=tid)]
    return found


def _metadata(kind: str, rank: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": args}


def _slice(name: str, category: str, place: tuple[int, int], interval: tuple[int, int], **args: Any) -> Event:
    (rank, tid), (start_ns, stop_ns) = place, interval
    return {
        "ph": "X", "name": name, "cat": category, "pid": rank, "tid": tid,
        "ts": start_ns / 1e3, "dur": (stop_ns - start_ns) / 1e3, "args": args,
    }  # fmt: skip


def _slices(rank: int, number: int, step: Step, base_ns: int) -> list[Event]:
    def at(start_ns: int, stop_ns: int) -> tuple[int, int]:
        return start_ns - base_ns, stop_ns - base_ns

    name = f"step {number}: {step.phase}, {step.num_tokens} tokens, {step.num_ubatches} ubatches"
    facts = {"phase": step.phase, "num_ubatches": step.num_ubatches, "num_tokens": step.num_tokens}
    found = [_slice(name, "step", (rank, _STEP_TID), at(step.start_ns, step.stop_ns), step=number, **facts)]
    for span in step.spans:
        category, tid = (COMPUTE, _COMPUTE_TID) if span.lane == COMPUTE else (COMM, _COMM_TID)
        if span.part == "flight":
            category, tid = "flight", _FLIGHT_TID + span.ubatch
        facts = {"ubatch": span.ubatch, "layer": span.layer, "stage": span.stage.value, "part": span.part}
        facts |= {"kernel": span.kernel} if span.kernel else {}
        text = span.name.removesuffix(" flight")
        found.append(_slice(text, category, (rank, tid), at(span.start_ns, span.stop_ns), step=number, **facts))
    for one in step.hand_overs:
        name = f"hand-over ub{one.source} → ub{one.target}"
        facts = {"source": one.source, "target": one.target}
        place = (rank, _COMPUTE_TID)
        found.append(_slice(name, "hand-over", place, at(one.start_ns, one.stop_ns), step=number, **facts))
    for interval in exposed(step.spans):
        found.append(_slice("exposed", "exposed", (rank, _EXPOSED_TID), at(*interval), step=number))
    return found


def _flows(rank: int, number: int, step: Step, base_ns: int) -> list[Event]:
    """Arrows from the slice before a hand-over to the next one of the ubatch that it wakes, where there are both.

    An arrow's end belongs to the slice of its thread that its time lies in, so it begins within the last nanosecond.
    """
    found: list[Event] = []
    compute = sorted((s for s in step.spans if s.lane == COMPUTE and s.stop_ns > s.start_ns), key=lambda s: s.start_ns)
    for idx, one in enumerate(step.hand_overs):
        before = [s for s in compute if s.ubatch == one.source and s.stop_ns <= one.start_ns]
        after = next((s for s in compute if s.ubatch == one.target and s.start_ns >= one.stop_ns), None)
        if not before or after is None:
            continue
        both = {"name": "hand-over", "cat": "hand-over", "id": f"{rank}.{number}.{idx}", "pid": rank}
        both["tid"] = _COMPUTE_TID
        found.append({"ph": "s", **both, "ts": (before[-1].stop_ns - 1 - base_ns) / 1e3})
        found.append({"ph": "f", "bp": "e", **both, "ts": (after.start_ns - base_ns) / 1e3})
    return found


def _steps(found: list[Event]) -> list[list[Step]]:
    """The steps of each rank from their slices."""
    slices = [event for event in found if event["ph"] == "X"]
    ranks: list[list[Step]] = [[] for _ in range(1 + max((event["pid"] for event in slices), default=-1))]
    for event in slices:
        if event["cat"] == "step":
            args = event["args"]
            ranks[event["pid"]].append(Step(args["phase"], args["num_ubatches"], args["num_tokens"], *_times(event)))
    for event in slices:
        if event["cat"] not in (COMPUTE, COMM, "flight", "hand-over"):
            continue
        args, times = event["args"], _times(event)
        step = ranks[event["pid"]][args["step"]]
        if event["cat"] == "hand-over":
            step.hand_overs.append(HandOver(args["source"], args["target"], *times))
        else:
            lane = COMPUTE if event["cat"] == COMPUTE else COMM
            place = args["ubatch"], args["layer"], Stage(args["stage"]), args["part"]
            span = Span(lane, *place, *times, args.get("kernel", ""))
            step.spans.append(span)
    return ranks


def _times(event: Event) -> tuple[int, int]:
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)
