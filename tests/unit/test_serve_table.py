"""Results of `hocket bench serve` as a table: servers beside each other, no ratio that may be noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.bench.serve_table import AGAINST, ratio
from hocket.bench.table import read_reports, table_of
from hocket.cli.main import main

LOAD = {
    "num_prompts": 64,
    "input_len": 100,
    "output_len": 32,
    "request_rate": 8.0,
    "arrivals": "poisson",
    "max_concurrency": None,
    "prompts_file": None,
    "chat": False,
}
RATES = ("requests_per_s", "output_tokens_per_s")
TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def row(url: str, rates: list[float], ms: list[float | None], **changes: Any) -> dict[str, Any]:
    """Some runs, the second of which is a middle one."""
    spread = None if None in ms else {"mean": ms[1], "median": ms[1], "p99": 2000.0, "max": 3000.0}
    return {
        "url": url,
        "load": LOAD,
        "repeats": len(rates),
        "num_failed": 0,
        **dict.fromkeys(RATES, rates[1] if len(rates) > 1 else rates[0]),
        **dict.fromkeys(TIMES, spread),
        "runs": dict.fromkeys(RATES, rates) | dict.fromkeys(TIMES, ms),
        **changes,
    }


def cells(table: str) -> list[dict[str, str]]:
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(names, line, strict=True)) for line in rows]


def test_servers_stand_beside_each_other() -> None:
    first = row("http://a", [90.0, 100.0, 100.0, 110.0], [9.0, 10.0, 10.0, 11.0])
    second = row("http://b", [180.0, 210.0, 210.0, 231.0], [4.5, 5.0, 5.0, 11.5], num_failed=3)
    table = table_of([{"bench": "serve", "rows": [first, second]}])
    assert table.splitlines()[0] == "load 64 requests of 100 + 32 tokens, 8/s poisson, runs 4"
    one, two = cells(table)
    assert (one["server"], one["requests/s × first"], one["FAILED"]) == ("http://a", "", "")
    assert one["output tokens/s"] == "100.0 [90.0 – 110.0]"
    assert two["output tokens/s × first"] == "2.10 [2.00 – 2.10]"
    assert (two["first token, ms"], two["first token, p99"]) == ("5.0 [4.5 – 11.5]", "2,000.0")
    assert two["first token, ms × first"] == "within the spread"
    assert two["FAILED"] == "3"


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ([2.0] * 4, [1.0] * 4, "2.00 [2.00 – 2.00]"),
        ([4.0, 3.0, 4.0, 5.0], [2.0, 2.0, 2.0, 2.5], "2.00 [1.50 – 2.00]"),
        ([0.5, 0.7, 0.5, 0.7], [1.0] * 4, "0.60 [0.50 – 0.70]"),
        ([1.5, 2.0, 2.0, 2.0], [1.0, 1.0, 1.5, 1.0], "within the spread"),  # they touch
        ([1.0, 9.0, 9.0, 9.0], [2.0] * 4, "within the spread"),
        ([9.0] * 3, [1.0] * 3, "too few runs (3 of 4)"),
        ([9.0], [1.0], "too few runs (1 of 4)"),
        ([9.0, 9.0, 9.0, None], [1.0] * 4, ""),
        (None, [1.0] * 4, ""),
    ],
)
def test_no_ratio_is_given_inside_the_spread(mine: Any, theirs: Any, said: str) -> None:
    assert ratio({"runs": {"ttft_ms": mine}, AGAINST: {"runs": {"ttft_ms": theirs}}}, "ttft_ms") == said
    assert ratio({"runs": {"ttft_ms": mine}, AGAINST: None}, "ttft_ms") == ""


def test_servers_of_two_results_have_no_ratio_and_their_loads_are_told() -> None:
    """They did not take turns."""
    quick = row("http://b", [200.0] * 3, [1.0] * 3, load=LOAD | {"request_rate": None, "max_concurrency": 4})
    reports: list[Any] = [{"bench": "serve", "rows": [one]} for one in (row("http://a", [1.0] * 3, [9.0] * 3), quick)]
    one, two = cells(table_of(reports))
    assert "requests/s × first" not in two
    assert one["load"] == "64 requests of 100 + 32 tokens, 8/s poisson"
    assert two["load"] == "64 requests of 100 + 32 tokens, all at once, at most 4 at once"


def test_a_result_of_another_engine_and_one_without_answers() -> None:
    reports: list[Any] = [
        {"bench": "serve", "rows": [row("http://a", [1.0] * 3, [9.0] * 3)]},
        {"bench": "serve", "engine": "Other 1.0", "rows": [row("http://b", [0.0] * 3, [None] * 3)]},
    ]
    one, two = cells(table_of(reports))
    assert (one["first token, ms"], two["first token, ms"], two["first token, p99"]) == ("9.0 [9.0 – 9.0]", "", "")


def test_the_command_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ab.json"
    path.write_text(json.dumps({"bench": "serve", "rows": [row(url, [1.0] * 3, [2.0] * 3) for url in ("a", "b")]}))
    monkeypatch.setattr("sys.argv", ["hocket", "bench", "table", str(path)])
    assert main() == 0
    assert capsys.readouterr().out.rstrip("\n") == table_of(read_reports([str(path)]))
