"""The dashboard and the documentation name metrics that exist, and all of them; Prometheus' configuration fits."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import problems, selectors

from hocket.metrics.show import SCRAPE_S
from hocket.metrics.table import METRICS, NAMES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
ALERTS = [line for line in re.findall(r"^```promql\n(.*?)```", DOCUMENT, re.M | re.S)[0].splitlines() if line[0] != "#"]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/hocket.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panels_expressions_make_sense(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert problems(target["expr"]) == [], target["expr"]
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = {label for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in found.split(", ")}
        labels = {"engine", *(label for metric in METRICS.values() for label in metric.labels)}
        assert used <= (grouped or labels), "a legend of labels that are gone"


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(hocket:step_total[1m])", "no metric hocket:step_total"),
        ("rate(vllm:generation_tokens_total[1m])", "no metric vllm:generation_tokens_total"),  # under the other names
        ('rate(hocket:steps_total{fase="decode"}[1m])', "hocket:steps_total has no label fase"),
        ("sum by (reason) (rate(hocket:steps_total[1m]))", "groups by reason"),
        ("rate(${names}:num_requests_running[1m])", "hocket:num_requests_running is a gauge"),
        ("sum(hocket:steps_total)", "hocket:steps_total is a counter"),
        ("rate(hocket:steps_total)", "hocket:steps_total: a range and rate"),
        ("median(rate(hocket:steps_total[1m]))", "what is median?"),
        ("sum(rate(hocket:steps_total[1m])", "parentheses"),
        ("1", "names no metric"),
    ],
)
def test_what_is_wrong_is_found(expression: str, problem: str) -> None:
    assert problem in problems(expression)


def test_alerts_make_sense() -> None:
    assert len(ALERTS) == 2
    assert [problems(alert) for alert in ALERTS] == [[], []]


def test_every_metric_has_a_panel() -> None:
    shown = {one.name for text in EXPRESSIONS for one in selectors(text.replace("${names}", NAMES[0]))}
    spared = {"request_time_per_output_token_seconds", "request_inference_time_seconds"}
    spared |= {"request_prompt_tokens", "request_generation_tokens", "hottest_expert"}
    missing = {name for name, metric in METRICS.items() if not shown.intersection(metric.series())}
    assert missing == spared


def test_the_dashboard_can_be_drawn() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*ids}) == len(ids)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, f"{one} and {other} overlap"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["names"]["query"].split(",") == list(NAMES)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used - {"__rate_interval"} == {*variables}
    for name in ("model", "engine"):
        assert not problems("sum(rate(" + re.findall(r"(hocket:\w+)", variables[name]["definition"])[0] + "[1m]))")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_is_as_grafana_reads_it(panel: dict[str, Any]) -> None:
    """Its data come from the source that is chosen above, and curves have a unit and a legend."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert [panel["datasource"], *(target.get("datasource", source) for target in panel["targets"])] == [source] * (
        1 + len(panel["targets"])
    )
    names = [target["refId"] for target in panel["targets"]]
    assert names == sorted({*names})
    if panel["type"] == "timeseries":
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "percentunit", "ops", "reqps", "Bps")
        assert panel["options"]["legend"]["displayMode"] == "list"
        assert all(target["legendFormat"] for target in panel["targets"])


def test_prometheus_waits_longer_than_a_scrape() -> None:
    found = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))
    (job,) = found["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]
    seconds = {name: int(found["global"][name].removesuffix("s")) for name in ("scrape_interval", "scrape_timeout")}
    assert 2 * SCRAPE_S < seconds["scrape_timeout"] <= seconds["scrape_interval"]


def test_the_documentation_has_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `([\w:]+)(?:\{([\w,]+)\})?` \| (\w+) \| (.+) \|$", DOCUMENT, re.M)
    expected = [
        (metric.name + "_total" * (metric.kind == "counter"), ",".join(metric.labels), metric.kind, metric.help)
        for metric in METRICS.values()
    ]
    assert rows == expected
