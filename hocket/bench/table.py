"""Result files as markdown tables, other engines' figures beside ours. Knows what rows hold, not how they were made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.bench import serve_table
from hocket.bench.serve_table import Column, Row
from hocket.errors import ConfigError

OURS = "Hocket"


def read_reports(paths: Sequence[str]) -> list[Row]:
    """Results of one benchmark, each a file that `--output` wrote or a line of JSON.

    Raises:
        ConfigError: a file is none, is of a benchmark without a table, or of another one than the first.
    """
    found: list[Row] = []
    for path in paths:
        try:
            report = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("file", path, f"a result in JSON ({error})") from None
        bench = report.get("bench") if isinstance(report, dict) else None
        if bench not in COLUMNS or not isinstance(report.get("rows"), list):
            raise ConfigError("file", path, f"a result of {', '.join(COLUMNS)}")
        if found and found[0]["bench"] != bench:
            raise ConfigError("file", path, f"a result of {found[0]['bench']}, as the first file")
        found.append(report)
    return found


def table_of(reports: Sequence[Row]) -> str:
    """One table over the rows of all `reports`, which are of one benchmark.

    What all rows were measured with alike stands above it; what no row has is left out.

    Rows of other engines (reports with an "engine") stand behind ours of the same kind. A ratio to them is given only
    where it lies outside the spread of both.
    """
    rows = [row | _of_report(report, row) for report in reports for row in report["rows"]]
    rows.sort(key=lambda row: (str(row.get("phase")), row.get("tokens_per_gpu") or 0, row["engine"] != OURS))
    settings, figures = COLUMNS[reports[0]["bench"]]
    columns = [(title, [cell(row) for row in rows]) for title, cell in [*settings, *figures]]
    others = [row for row in rows if row["engine"] != OURS and "tokens_per_s" in row]
    if others:
        columns.append(("against others", [_against(row, others) for row in rows]))
    alike = {title for title, cells in columns[: len(settings)] if len(set(cells)) == 1}
    above = [f"{title} {cells[0]}" for title, cells in columns if title in alike and cells[0]]
    shown = [(title, cells) for title, cells in columns if title not in alike and any(cells)]
    lines = [", ".join(above), ""] if above else []
    lines += [_line([title for title, _ in shown]), _line(["---"] * len(shown))]
    lines += [_line([cells[i] for _, cells in shown]) for i in range(len(rows))]
    notes = list(dict.fromkeys(note for row in rows if (note := bytes_read(row))))
    return "\n".join([*lines, "", *notes] if notes else lines)


def _of_report(report: Row, row: Row) -> Row:
    """What a row gets of its report: whose engine it is of, and of servers the first one, if that is another."""
    first = report["rows"][0]
    return {"engine": report.get("engine", OURS), serve_table.AGAINST: None if row is first else first}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(key: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        value = row.get(key)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)

    return shown


def _model(row: Row) -> str:
    name, slice_of = Path(str(row["model"])).name, row.get("slice")
    return f"{name}, slice of EP{slice_of['of_ep']}" if slice_of else name


def _link(row: Row) -> str:
    link = row.get("link") or {}
    if link.get("kind") != "emulated":
        return str(link.get("kind") or "")
    out, back = (link.get(f"{kind}_bytes_per_token") for kind in ("dispatch", "combine"))
    volume = "" if out is None else f", {out:,.0f} + {back:,.0f} bytes a token"
    latency = "" if link["latency_us"] is None else f", {link['latency_us']:g} µs"
    return f"EMULATED {link['gb_per_s']:g} GB/s{latency}{volume}"


def _figure(key: str, scale: float, digits: int) -> Callable[[Row], str]:
    """The row's figure divided by `scale`, with its range where there is one: of "spread", or its own."""

    def shown(row: Row) -> str:
        value, ends = row.get(key), (row.get("spread") or {}).get(key)
        if isinstance(value, dict):
            value, ends = value["median"], (value["min"], value["max"])
        if value is None:
            return ""
        text = f"{value / scale:,.{digits}f}"
        return text if ends is None else f"{text} [{ends[0] / scale:,.{digits}f} – {ends[1] / scale:,.{digits}f}]"

    return shown


def _kernel_ms(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row['kernels'][key] / 1e3:.2f}" if row.get("kernels") else ""


def _times_floor(row: Row) -> str:
    """How many times its floor a step is, communication included, which no floor counts; of a layer its experts."""
    floor, step = row.get("floor_us"), row.get("step_us", row.get("experts_us"))
    step = step["median"] if isinstance(step, dict) else step
    return f"{step / floor:.2f}" if floor and step else ""


def _exposed(row: Row) -> str:
    value, source = row.get("exposed_comm_us"), row.get("exposed_from")
    return "" if value is None else f"{value / 1e3:.2f}{'' if source == 'lanes' else f' ({source})'}"


def _times_serial(row: Row) -> str:
    """A step over one without overlap; only where the repeats of the two lie apart."""
    if row.get("strategy") == "serial" or row.get("serial_us") is None:
        return ""
    if row.get("repeats", 0) < 2 or not row.get("spread"):
        return "one run, no spread known"
    (low, high), (serial_low, serial_high) = _ends(row, "step_us"), _ends(row, "serial_us")
    if low <= serial_high and serial_low <= high:
        return "within the spread"
    return f"{row['step_us'] / row['serial_us']:.2f}"


def _times_bound(row: Row) -> str:
    bound = row.get("bound_us")
    return f"{row['step_us'] / bound:.2f}" if bound and row.get("strategy") != "serial" else ""


def bytes_read(row: Row) -> str:
    """What a split step reads against an unsplit one, as a sentence; "" for other rows."""
    floor = row.get("floor") or {}
    whole = floor.get("unsplit")
    if whole is None:
        return ""
    cache, output_layer = (floor["parts"][name]["bytes"] for name in ("attention", "logits"))
    once, split = (_size(one["bytes"] - cache - output_layer) for one in (whole, floor))
    floors = "" if floor["us"] is None else f"; floor {whole['us'] / 1e3:.2f} ms unsplit, {floor['us'] / 1e3:.2f} split"
    return (
        f"A {row['phase']} of {row['tokens_per_gpu']} reads {once} of weights, in {row['num_ubatches']} ubatches "
        f"{split}; either way {_size(cache)} of cache and {_size(output_layer)} of the output layer: "
        f"{_size(whole['bytes'])} become {_size(floor['bytes'])} ({floor['bytes'] / whole['bytes']:.2f} ×){floors}."
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"


def _against(row: Row, others: Sequence[Row]) -> str:
    """Tokens/s over those of every other engine's row of the same kind."""
    if row["engine"] != OURS:
        return ""
    kind = ("phase", "tokens_per_gpu", "dtype", "layers")
    found = []
    for other in others:
        if _model(other) != _model(row) or any(other.get(key) != row.get(key) for key in kind):
            continue
        how = f"{other['engine']} {other.get('transport', '')}, {other.get('strategy', '')}"
        ratio = "within the spread" if _overlap(row, other) else f"{row['tokens_per_s'] / other['tokens_per_s']:.2f} ×"
        found.append(f"{ratio} {how}")
    return "; ".join(found)


def _overlap(row: Row, other: Row) -> bool:
    (low, high), (other_low, other_high) = (_ends(one, "tokens_per_s") for one in (row, other))
    return low <= other_high and other_low <= high


def _ends(row: Row, key: str) -> tuple[float, float]:
    """Least and largest; of a figure without a spread itself twice."""
    low, high = (row.get("spread") or {}).get(key) or (row[key], row[key])
    return low, high


_COMMON: list[Column] = [
    ("engine", _text("engine")),
    ("model", _model),
    ("layers", _text("layers")),
    ("dtype", _text("dtype")),
    ("device", _text("device")),
    ("ranks", _text("num_ranks")),
    ("transport", _text("transport")),
    ("link", _link),
    ("experts", _text("experts")),
]
_ENGINE: list[Column] = [("attention", _text("attention")), ("overlap", _text("strategy"))]
COLUMNS: dict[str, tuple[list[Column], list[Column]]] = {
    "step": (
        [*_COMMON, *_ENGINE, ("graphs", _text("graphs"))],
        [
            ("phase", _text("phase")),
            ("tokens/GPU", _text("tokens_per_gpu")),
            ("context", _text("context")),
            ("step, ms", _figure("step_us", 1e3, 2)),
            ("× serial", _times_serial),
            ("bound, ms", _figure("bound_us", 1e3, 2)),
            ("× bound", _times_bound),
            ("µs/layer", _figure("layer_us", 1, 0)),
            ("bound, µs/layer", _figure("layer_bound_us", 1, 0)),
            ("compute, ms", _figure("compute_us", 1e3, 2)),
            ("in halves", _figure("compute_halves_us", 1e3, 2)),
            ("floor, ms", _figure("floor_us", 1e3, 2)),
            ("× floor", _times_floor),
            ("comm, ms", _figure("comm_us", 1e3, 2)),
            ("comm in halves", _figure("comm_halves_us", 1e3, 2)),
            ("exposed, ms", _exposed),
            ("tokens/s per GPU", _figure("tokens_per_s", 1, 0)),
            ("kernels", _text("kernels_per_step")),
            ("kernels, ms", _kernel_ms("us")),
            ("graph alone, ms", _figure("replay_us", 1e3, 2)),
            ("NCCL, ms", _kernel_ms("nccl_us")),
        ],
    ),
    "layer": (
        [*_COMMON, ("graphs", _text("graphs"))],
        [
            ("tokens/GPU", _text("tokens_per_gpu")),
            ("rows/expert", _text("rows_per_expert")),
            ("router, µs", _figure("router_us", 1, 1)),
            ("dispatch, µs", _figure("dispatch_us", 1, 1)),
            ("experts, µs", _figure("experts_us", 1, 1)),
            ("combine, µs", _figure("combine_us", 1, 1)),
            ("layer, µs", _figure("layer_us", 1, 1)),
            ("experts' floor, µs", _figure("floor_us", 1, 1)),
            ("experts × floor", _times_floor),
        ],
    ),
    "serve": (serve_table.SETTINGS, serve_table.FIGURES),
    "throughput": (
        [*_COMMON, *_ENGINE],
        [
            ("requests/s", _figure("requests_per_s", 1, 1)),
            ("output tokens/s", _figure("output_tokens_per_s", 1, 1)),
            ("total tokens/s", _figure("total_tokens_per_s", 1, 1)),
            ("step, µs", _figure("step_us", 1, 1)),
        ],
    ),
}
"""By benchmark: what it was measured with, shown once where it is the same everywhere, and what was measured."""
