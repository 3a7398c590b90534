"""A recording on one screen: the lanes of one sparse layer as text, and the figures. Knows no file format."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hocket.trace.figures import Interval, StepFigures, exposed
from hocket.trace.recording import Recording, middle_layer, typical_step, window_of
from hocket.trace.spans import COMPUTE, Span, Step

MAX_WIDTH, MAX_RANKS, MIN_LANE = 110, 4, 20
MIN_MEANING = 35
"""Columns; in fewer the figures stand alone."""
_LABEL_WIDTH = 17
_NAME_WIDTH, _VALUE_WIDTH = 22, 9
_FILLS = "░▒▓█"
_STYLES = ("black on bright_blue", "black on yellow", "black on green", "black on magenta")
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
BOUND = "bound = max(compute, communication) of a step: what it would take if the shorter lane were hidden wholly"
LABELS = {"hand_over": "hand-over", "hidden_share": "hidden / comm"}
OF_COMM = ("comm", "hidden", "hidden_share", "exposed", "bound")
ROWS: tuple[tuple[str, str], ...] = (
    ("step", "model's forward pass"),
    ("compute", ""),
    ("stall", "compute stands still"),
    ("comm", "transfers, with waits for other ranks"),
    ("hidden", "of it under compute"),
    ("hidden_share", "of it, as a share"),
    ("exposed", "of it while compute stands still"),
    ("hand_over", "between ubatches"),
    ("bound", ""),
)


def console(*, file: object = None) -> Console:
    """Of the terminal's width up to MAX_WIDTH; where there is no terminal, that wide."""
    found = Console(file=file, highlight=False)  # type: ignore[arg-type]
    found.width = min(found.width, MAX_WIDTH) if found.is_terminal else MAX_WIDTH
    return found


def show(recording: Recording, out: Console, label: str = "") -> None:
    """Print both. label: what to call it, where there is more than one."""
    number = typical_step(recording)
    steps = [rank[number] for rank in recording.ranks]
    layer = middle_layer(steps[0])
    window = window_of(steps, layer)
    out.print(Text(f"{label}: {recording.title}" if label else recording.title, style="bold"))
    what = (
        f"sparse layer {layer} of step {number}, {(window[1] - window[0]) / 1e3:,.0f} µs wide; small figures: ubatches"
    )
    out.print(Text(what, style="dim"))
    for note in recording.notes:
        out.print(Text(note, style="bold dim"))
    for rank, step in enumerate(steps[:MAX_RANKS], recording.first_rank):
        _print_lanes(out, rank, step, window)
    if len(steps) > MAX_RANKS:
        out.print(Text(f"and {len(steps) - MAX_RANKS} more ranks", style="dim"))
    out.print()
    out.print(_table(recording, out.width))
    if recording.has_comm:
        out.print(Text(BOUND, style="dim"))


def rows_of(recordings: Iterable[Recording]) -> list[tuple[str, str]]:
    """ROWS, without those about communication where there is none."""
    has_comm = any(recording.has_comm for recording in recordings)
    return [row for row in ROWS if has_comm or row[0] not in OF_COMM]


def _print_lanes(out: Console, rank: int, step: Step, window: Interval) -> None:
    width = max(out.width - _LABEL_WIDTH - 2, MIN_LANE)
    compute = [span for span in step.spans if span.lane == COMPUTE]
    flights = sorted((span for span in step.spans if span.part == "flight"), key=lambda span: span.start_ns)
    lines = {"compute": _lane(cells(compute, window, width))}
    if flights:
        lines["comm"] = _lane(cells(flights, window, width))
        marks = [Span(COMPUTE, 0, 0, flights[0].stage, "", *interval) for interval in exposed(step.spans)]
        found = cells(marks, window, width)
        lines["exposed"] = Text("".join(" " if cell is None else "▲" for cell in found), style="red")
    for number, (name, line) in enumerate(lines.items()):
        head = f"rank {rank:<3}" if number == 0 else ""
        out.print(Text(f"{head:<8} {name:<7} │").append(line), no_wrap=True, overflow="crop")


def cells(spans: list[Span], window: Interval, width: int) -> list[Span | None]:
    """`window` in `width` equal pieces: the span that has most of each, None where less than half of it is taken."""
    start, stop = window
    size = max((stop - start) / width, 1e-9)
    found: list[Span | None] = []
    for number in range(width):
        left, right = start + number * size, start + (number + 1) * size
        shares = [(min(span.stop_ns, right) - max(span.start_ns, left), span) for span in spans]
        most = max((share for share, _ in shares), default=0.0)
        covered = sum(share for share, _ in shares if share > 0)
        found.append(next(span for share, span in shares if share == most) if covered >= size / 2 else None)
    return found


def _lane(found: list[Span | None]) -> Text:
    text = Text()
    for _, run in groupby(found, key=lambda span: span and (span.ubatch, span.layer, span.stage)):
        span, *more = run  # a stage may have been cut, or be of many kernels
        length = 1 + len(more)
        if span is None:
            text.append(" " * length)
            continue
        text.append(_label(span, length), style=_STYLES[span.ubatch % len(_STYLES)])
    return text


def _label(span: Span, length: int) -> str:
    """The stage's name where it fits, in the middle of what marks its ubatch."""
    idx = str(span.ubatch).translate(_SUBSCRIPTS)
    names = (f"{span.stage.short}{idx}", f"{span.stage.value}{idx}", "")
    name = next(name for name in names if len(name) <= max(length - 1, 0) or not name)
    return name.center(length, _FILLS[span.ubatch % len(_FILLS)])


def _table(recording: Recording, width: int) -> Table:
    """ms of a step, mean of those recorded, by rank; what the names mean where there is room beside them."""
    figures, rows = recording.figures(), rows_of([recording])
    table = Table(box=None, padding=(0, 2, 0, 0))
    num_steps = figures[0].num_steps
    table.add_column(f"ms, mean of {num_steps} step{'s' * (num_steps > 1)}", no_wrap=True)
    shown = figures[:MAX_RANKS]
    for rank, one in enumerate(shown, recording.first_rank):
        longest = max(len(_value(name, one)) for name, _ in rows)
        table.add_column(f"rank {rank}", justify="right", no_wrap=True, min_width=longest)
    with_meaning = width >= _NAME_WIDTH + len(shown) * _VALUE_WIDTH + MIN_MEANING
    if with_meaning:
        table.add_column("", style="dim", no_wrap=True, overflow="ellipsis")
    for name, meaning in rows:
        style = "red" if name == "exposed" else None
        table.add_row(
            LABELS.get(name, name),
            *(_value(name, one) for one in shown),
            *[_meaning(name, meaning, shown[0])] * with_meaning,
            style=style,
        )
    if "bound" in dict(rows):
        ratios = (f"{one.over_bound:.2f}" for one in shown)
        table.add_row("step / bound", *ratios, *["1.00 is perfect"] * with_meaning, style="bold")
    return table


def _value(name: str, figures: StepFigures) -> str:
    if name == "hidden_share":
        return f"{figures.hidden_share:.0%}"
    return f"{figures.per_step_us()[name] / 1e3:,.3f}"


def _meaning(name: str, meaning: str, first: StepFigures) -> str:
    if name == "hand_over" and first.num_hand_overs:
        each_us = first.hand_over_ns / first.num_hand_overs / 1e3
        return f"{meaning}: {first.num_hand_overs / first.num_steps:g} of {each_us:.1f} µs (rank 0)"
    return meaning
