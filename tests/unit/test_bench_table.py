"""Results as tables: what is alike stands above, other engines beside ours, no ratio inside the spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.bench.floor import Rates, StepShape, floor_of, split_parts, step_parts
from hocket.bench.table import read_reports, table_of
from hocket.config.model import ModelConfig
from hocket.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SHAPES = RESULTS.parent / "shapes"
REFERENCE = "2026-11-29-step-vllm-0.25.1-reference.json"


def row(tokens: int, tokens_per_s: float, spread: tuple[float, float], **changes: Any) -> dict[str, Any]:
    step_us = tokens / tokens_per_s * 1e6
    return {
        "model": "benchmarks/shapes/deepseek-v2-lite",
        "layers": 27,
        "dtype": "bfloat16",
        "phase": "decode",
        "tokens_per_gpu": tokens,
        "transport": "torch",
        "strategy": "off",
        "link": {"kind": "emulated", "gb_per_s": 23.0, "latency_us": 5.0},
        "graphs": True,
        "step_us": step_us,
        "floor_us": step_us / 2,
        "tokens_per_s": tokens_per_s,
        "spread": {"tokens_per_s": list(spread), "step_us": [tokens / end * 1e6 for end in reversed(spread)]},
        **changes,
    }


def ours(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"bench": "step", "rows": list(rows)}


def cells(table: str) -> list[dict[str, str]]:
    """The rows of a markdown table, by column."""
    lines = [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines() if line.startswith("|")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_what_is_alike_stands_above() -> None:
    table = table_of([ours(row(64, 4000.0, (3900.0, 4100.0)), row(128, 6000.0, (5900.0, 6100.0), graphs=False))])
    above = table.splitlines()[0]
    for part in ("engine Hocket", "model deepseek-v2-lite", "link EMULATED 23 GB/s, 5 µs", "overlap off"):
        assert part in above
    first, second = cells(table)
    assert (first["graphs"], second["graphs"]) == ("yes", "no")
    assert (first["step, ms"], first["× floor"]) == ("16.00 [15.61 – 16.41]", "2.00")
    assert second["tokens/s per GPU"] == "6,000 [5,900 – 6,100]"
    assert "context" not in first, "none of the rows has one"


def other(tokens_per_s: float, spread: tuple[float, float], **changes: Any) -> dict[str, Any]:
    return {"engine": "Other 1.0", "bench": "step", "rows": [row(64, tokens_per_s, spread, **changes)]}


def test_others_stand_beside_ours() -> None:
    both = ours(row(64, 4000.0, (3900.0, 4100.0)), row(128, 2000.0, (1900.0, 2100.0)))
    mine, theirs, larger = cells(table_of([other(2000.0, (1990.0, 2010.0)), both]))
    assert (mine["engine"], theirs["engine"], larger["engine"]) == ("Hocket", "Other 1.0", "Hocket")
    assert mine["against others"] == "2.00 × Other 1.0 torch, off"
    assert (theirs["against others"], larger["against others"]) == ("", ""), "of another number of tokens"
    fp8 = table_of([both, other(2000.0, (1990.0, 2010.0), dtype="fp8")])
    assert "against others" not in fp8


@pytest.mark.parametrize(
    ("theirs", "spread", "said"),
    [
        (3880.0, (3850.0, 3890.0), "1.03 ×"),
        (3880.0, (3850.0, 3900.0), "within the spread"),
        (4000.0, (1.0, 9000.0), "within the spread"),
        (4110.0, (4101.0, 4120.0), "0.97 ×"),
        (4110.0, (4100.0, 4120.0), "within the spread"),
    ],
)
def test_no_ratio_is_given_inside_the_spread(theirs: float, spread: tuple[float, float], said: str) -> None:
    mine = ours(row(64, 4000.0, (3900.0, 4100.0)))
    assert cells(table_of([mine, other(theirs, spread)]))[0]["against others"] == f"{said} Other 1.0 torch, off"


def test_a_figure_without_a_spread_is_a_point() -> None:
    mine = ours(row(64, 4000.0, (3900.0, 4100.0)))
    for theirs, said in ((3899.0, "1.03 ×"), (3901.0, "within the spread")):
        report = other(theirs, (1.0, 1.0))
        del report["rows"][0]["spread"]
        assert cells(table_of([mine, report]))[0]["against others"].startswith(said)


def split(step_us: tuple[float, float, float], serial_us: tuple[float, float, float], **changes: Any) -> dict[str, Any]:
    """Each least, median and most."""
    spread = {"step_us": [step_us[0], step_us[2]], "serial_us": [serial_us[0], serial_us[2]]}
    figures = {"step_us": step_us[1], "serial_us": serial_us[1], "bound_us": 1000.0, "tokens_per_s": 1.0}
    exposed = {"exposed_comm_us": 250.0, "exposed_from": "profile"}
    return (
        row(64, 1.0, (1.0, 1.0))
        | figures
        | exposed
        | {"strategy": "dual_batch", "repeats": 5, "spread": spread}
        | changes
    )


@pytest.mark.parametrize(
    ("step_us", "serial_us", "changes", "said"),
    [
        ((990.0, 1100.0, 1200.0), (1300.0, 2200.0, 2300.0), {}, "0.50"),
        ((990.0, 1100.0, 1300.0), (1300.0, 2200.0, 2300.0), {}, "within the spread"),
        ((2300.0, 2310.0, 2320.0), (2310.0, 2320.0, 2330.0), {}, "within the spread"),
        ((2310.0, 3300.0, 3400.0), (2200.0, 2200.0, 2300.0), {}, "1.50"),
        ((1100.0, 1100.0, 1100.0), (2200.0, 2200.0, 2200.0), {"repeats": 1}, "one run, no spread known"),
    ],
)
def test_no_speed_up_is_given_inside_the_noise(
    step_us: tuple[float, float, float], serial_us: tuple[float, float, float], changes: dict[str, Any], said: str
) -> None:
    (shown,) = cells(table_of([ours(split(step_us, serial_us, **changes))]))
    assert shown["× serial"] == said
    assert shown["× bound"] == f"{step_us[1] / 1000:.2f}"
    assert shown["exposed, ms"] == "0.25 (profile)"


def test_strategies_of_a_cell_stand_below_each_other() -> None:
    both = ours(split((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), row(64, 2.0, (1.0, 3.0), strategy="serial", serial_us=1.0))
    first, second = cells(table_of([both]))
    assert (first["overlap"], second["overlap"]) == ("dual_batch", "serial")
    assert (first["× serial"], second["× serial"], second["× bound"]) == ("0.40", "", "")


def test_what_a_split_step_reads() -> None:
    """18.7 GB, of which 16.2 are weights that two ubatches read twice."""
    model = ModelConfig.from_pretrained(SHAPES / "deepseek-v2-lite")
    given, step = Rates(bytes_per_s=4.3e12, flops_per_s=780e12, fp8_flops_per_s=1560e12, source="given"), 64
    sizes = model, StepShape.decode(step, 1056), 2, "bfloat16"
    floor = floor_of(split_parts(*sizes, 2), given) | {"unsplit": floor_of(step_parts(*sizes), given)}
    table = table_of([ours(split((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), floor=floor, num_ubatches=2))])
    assert table.splitlines()[-1] == (
        "A decode of 64 reads 16.18 GB of weights, in 2 ubatches 32.31 GB; either way 2.10 GB of cache and 0.42 GB of "
        "the output layer: 18.70 GB become 34.83 GB (1.86 ×); floor 4.35 ms unsplit, 8.10 split."
    )


def test_a_volume_that_is_not_what_was_sent_is_said() -> None:
    link = {"kind": "emulated", "gb_per_s": 46.0, "latency_us": None}
    volume = {"dispatch_bytes_per_token": 29568.0, "combine_bytes_per_token": 57344.0}
    table = table_of([ours(row(64, 1.0, (1.0, 1.0), link=link | volume))])
    assert "link EMULATED 46 GB/s, 29,568 + 57,344 bytes a token" in table


def test_a_slice_is_no_match_for_the_whole_model() -> None:
    table = table_of([ours(row(64, 4000.0, (3900.0, 4100.0), slice={"of_ep": 32})), other(2000.0, (1990.0, 2010.0))])
    assert cells(table)[0]["model"] == "deepseek-v2-lite, slice of EP32"
    assert "2.00 ×" not in table


def test_the_committed_reference() -> None:
    """The published figures; ours of the same kind are compared with them."""
    mine = row(256, 17_816.0, (17_000.0, 18_000.0))
    table = table_of([ours(mine), *read_reports([str(RESULTS / REFERENCE)])])
    assert "2.00 × vLLM 0.25.1 allgather_reducescatter, off" in table
    shown = {(one["tokens/GPU"], one["transport"]): one["tokens/s per GPU"] for one in cells(table)}
    assert shown["64", "allgather_reducescatter"] == "5,466"
    assert shown["4096", "allgather_reducescatter"] == "37,400"


def test_every_committed_result_of_these_benchmarks_has_a_table() -> None:
    for path in RESULTS.glob("*.json"):
        if json.loads(path.read_text())["bench"] in ("step", "layer", "throughput"):
            assert cells(table_of(read_reports([str(path)])))


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for text in ("{", "[]", '{"bench": "step"}', '{"bench": "handover", "rows": []}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"result\.json"):
            read_reports([str(path)])
    path.write_text('{"bench": "layer", "rows": []}')
    with pytest.raises(ConfigError, match="a result of step, as the first file"):
        read_reports([str(RESULTS / REFERENCE), str(path)])
    with pytest.raises(ConfigError, match="absent"):
        read_reports([str(tmp_path / "absent.json")])
