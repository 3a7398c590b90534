"""Recordings as one HTML page that needs no network. Computes what the page shows; how it looks is in its template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.trace.figures import StepFigures, exposed, step_figures
from hocket.trace.picture import BOUND, LABELS, rows_of
from hocket.trace.recording import Recording, layers_of, middle_layer, typical_step, window_of
from hocket.trace.spans import COMPUTE, Step

_TEMPLATE = Path(__file__).resolve().parent.parent / "assets" / "trace" / "page.html"
_MARK = "__DATA__"


def write(recordings: Mapping[str, Recording], path: Path) -> None:
    """One panel for each recording, under its label. Raises OSError."""
    path.write_text(page(recordings), encoding="utf-8")


def page(recordings: Mapping[str, Recording]) -> str:
    """The page's HTML."""
    has_comm = any(recording.has_comm for recording in recordings.values())
    data = {
        "bound": BOUND if has_comm else "",
        "rows": [[name, LABELS.get(name, name), meaning] for name, meaning in rows_of(recordings.values())],
        "panels": [_panel(label, recording) for label, recording in recordings.items()],
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )  # nothing ends the script
    head, mark, tail = _TEMPLATE.read_text(encoding="utf-8").partition(_MARK)
    assert mark, "the template has a place for the data"
    return head + text + tail


def _panel(label: str, recording: Recording) -> dict[str, Any]:
    base_ns = recording.base_ns
    numbers = range(min(len(steps) for steps in recording.ranks))
    return {
        "label": label,
        "title": recording.title,
        "notes": recording.notes,
        "command": recording.about.get("command", ""),
        "numUbatches": recording.num_ubatches,
        "firstRank": recording.first_rank,
        "typical": typical_step(recording),
        "mean": [_figures(one) for one in recording.figures()],
        "steps": [_step([steps[number] for steps in recording.ranks], base_ns) for number in numbers],
    }


def _step(steps: list[Step], base_ns: int) -> dict[str, Any]:
    """One step on all ranks; times in ns from the first recorded step's start."""
    layers = [[layer, *(at - base_ns for at in window_of(steps, layer))] for layer in layers_of(steps[0])]
    return {
        "about": f"{steps[0].phase}, {steps[0].num_tokens} tokens, {_ubatches(steps[0].num_ubatches)}",
        "window": [min(s.start_ns for s in steps) - base_ns, max(s.stop_ns for s in steps) - base_ns],
        "layers": layers,
        "middle": middle_layer(steps[0]),
        "ranks": [_rank(step, base_ns) for step in steps],
    }


def _ubatches(count: int) -> str:
    return "unsplit" if count == 1 else f"{count} ubatches"


def _rank(step: Step, base_ns: int) -> dict[str, Any]:
    return {
        "figures": _figures(step_figures([step])),
        "spans": [
            [
                "flight" if span.part == "flight" else span.lane,
                span.ubatch,
                span.layer,
                span.stage.value,
                span.name.removesuffix(" flight"),
                span.start_ns - base_ns,
                span.stop_ns - span.start_ns,
                span.kernel,
            ]
            for span in sorted(step.spans, key=lambda span: (span.lane != COMPUTE, span.start_ns))
        ],
        "exposed": [[start - base_ns, stop - start] for start, stop in exposed(step.spans)],
        "handOvers": [[o.source, o.target, o.start_ns - base_ns, o.stop_ns - o.start_ns] for o in step.hand_overs],
    }


def _figures(figures: StepFigures) -> dict[str, float]:
    """µs of a step by name, and the two ratios."""
    return figures.per_step_us() | {"over_bound": figures.over_bound, "hidden_share": figures.hidden_share}
