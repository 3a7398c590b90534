"""Prints a verification for people. Knows only its plain values; torch-free."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hocket.verify.states import PLACES

WIDTH = 120
Row = dict[str, Any]


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print `report`, what `verify` gives."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for line in _about(report):
        console.print(Text(line), soft_wrap=True)
    console.print(_table(report["rows"]))
    for row in report["rows"]:
        for line in _hints(row, report["rules"]):
            console.print(Text(line), soft_wrap=True)
    if report["problems"]:
        console.print(Text(f"✗ {len(report['problems'])} of {len(report['rows'])} configurations are wrong", "red"))
    else:
        console.print(Text(f"✓ {len(report['rows'])} configurations gave the same answers", "green"))


def _about(report: dict[str, Any]) -> Iterator[str]:
    work, rules, lengths = report["workload"], report["rules"], report["workload"]["lengths"]
    yield (
        f"{report['model']} ({report['dtype']}) on {report['num_ranks']} ranks: {len(lengths)} prompts of "
        f"{min(lengths)} to {max(lengths)} tokens, {work['output_len']} more each, "
        f"at most {report['step_tokens']} in a rank's step"
    )
    yield "thresholds are lowered to one token for each ubatch, so that small steps are split too"
    if rules["exact"]:
        yield "nothing may differ: tokens and log-probabilities are compared to the last bit"
    else:
        yield (
            f"tokens must be equal where the two are not within {rules['tie']:g} of each other, log-probabilities "
            f"within {rules['logprob']:g}"
        )
    if rules["usual"] is not None:
        yield (
            f"and but for one token in five within {rules['usual']:.2g}, twice what the dtype alone changes: measured "
            "with the prompts reversed"
        )
    for what in report["not_exercised"]:
        yield f"not exercised by these prompts: {what}"
    for why in report["skipped"]:
        yield f"left out: {why}"


def _table(rows: list[Row]) -> Table:
    table = Table()
    table.add_column("configuration")
    for name in ("same tokens", "max Δ log-prob", "first difference", "split"):
        table.add_column(name, justify="right")
    table.add_column("")
    for number, row in enumerate(rows):
        verdict = Text("✗", "red") if row["problem"] else Text("✓", "green")
        table.add_row(row["name"], *_figures(row, is_first=number == 0), verdict)
    return table


def _figures(row: Row, is_first: bool) -> tuple[str, str, str, str]:
    found, splits = row["comparison"], row["splits"]
    steps = f"{sum(splits['split'].values())}/{sum(splits['steps'].values())}"
    if found is None:
        return "", "", "", steps
    tokens = f"{found['num_same_tokens']}/{found['num_tokens']}"
    if found["num_ties"]:
        tokens += f" ({found['num_ties']} tie{'s' * (found['num_ties'] > 1)})"
    first = found["first"]
    where = "none" if first is None else f"request {first['request']}, token {first['token']}"
    if is_first:
        return tokens, "", "(the others: to this)", steps
    return tokens, f"{found['largest_logprob_difference']:.2g}", where, steps


def _hints(row: Row, rules: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a configuration, and where."""
    if row["problem"] is None:
        if row["bisection"] is not None:
            yield f"{row['name']}: {_layers_agree(row['bisection'])}"
        return
    yield f"{row['name']}: {row['problem']}"
    found, bisection = row["comparison"], row["bisection"]
    first = None if found is None else found["first"]
    if first is not None:
        yield f"  {_difference(first)}"
    if found is not None and found["drifts"]:
        yield (
            f"  {found['num_unusual']} of {found['num_compared']} tokens have a log-probability that differs by over "
            f"{rules['usual']:.2g}"
        )
    if found is not None and row["splits"]["problem"] and "not a verification" not in row["problem"]:
        yield f"  not a verification either: {row['splits']['problem']}"
    if bisection is not None:
        is_clean = bisection["first"] is None and found is not None and first is None and not found["drifts"]
        yield f"  {_layers_agree(bisection) if is_clean else bisected(bisection, rules['state'])}"


def _difference(first: dict[str, Any]) -> str:
    """Where a request differs first, in one line."""
    here = f"request {first['request']}, token {first['token']}"
    found, expected = (
        "none" if token is None else f"{token} ({logprob:.4g})"
        for token, logprob in zip((first["found"], first["expected"]), first["logprobs"], strict=True)
    )
    if first["found"] == first["expected"]:
        return f"{here}: {found}, log-probabilities differ by {first['logprob_difference']:.2g}"
    return (
        f"{here}: {found} instead of {expected}, log-probabilities differ by {first['logprob_difference']:.2g} or more"
    )


def bisected(bisection: dict[str, Any], tolerance: float) -> str:
    """What the layers say, in one line."""
    first = bisection["first"]
    if first is None:
        return (
            f"{_layers_agree(bisection)}: the fault is behind the last one (joining ubatches, logits, sampling), or "
            "did not show again"
        )
    row, counts = first["row"], first["ubatches"]
    note = ""
    if first["num_differing"] == 1 and first["place"] == PLACES[-1] and tolerance > 0:
        note = "; one alone may be a near tie between two experts, which --deterministic rules out"
    ubatch = (
        f"ubatch {row['ubatch']} of {row['num_ubatches']}" if row["num_ubatches"] > 1 else "a step that is not split"
    )
    spread = ", ".join(f"{count} in ubatch {idx}" for idx, count in counts.items())
    return (
        f"first to differ: layer {first['layer']}, {first['place']}, {ubatch} (request {row['request_id']}, position "
        f"{row['position']}, {row['phase']} step {row['step']}), by {first['difference']:.2g} where {tolerance:g} is "
        f"allowed; {first['num_differing']} of {first['num_rows']} tokens differ there: {spread}{note}"
    )


def _layers_agree(bisection: dict[str, Any]) -> str:
    rows, strays, largest = bisection["num_rows"], bisection["num_strays"], bisection["largest"]
    line = f"hidden states of all {bisection['num_layers']} layers agree over {rows} tokens"
    if strays:
        return f"{line}, but for at most {strays} in a layer (by up to {largest:.2g}: near ties between experts)"
    return f"{line} (differ by at most {largest:.2g})"
