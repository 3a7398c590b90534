"""As much of PromQL as a dashboard needs to be checked: what an expression names, and whether it makes sense. For tests
only; https://prometheus.io/docs/prometheus/latest/querying/basics/ has the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hocket.metrics.table import ALWAYS, METRICS, NAMES, Metric

FUNCTIONS = {"rate", "increase", "sum", "avg", "max", "min", "histogram_quantile"}
OF_RANGES = {"rate", "increase"}
KEYWORDS = {"by", "ignoring", "on", "and"}
SELECTOR = re.compile(r"(?P<name>[a-z]+:\w+)(?:\{(?P<matchers>[^}]*)\})?(?P<range>\[[^]]+\])?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"[^"]*"')


@dataclass(frozen=True)
class Selector:
    """A name with its matchers, and the function around it ("": none)."""

    name: str
    labels: tuple[str, ...]
    function: str
    is_range: bool


def series(names: str) -> dict[str, Metric]:
    """Every series that /metrics can have, by name."""
    return {name: metric for metric in METRICS.values() for name in metric.series(names)}


def selectors(expression: str) -> list[Selector]:
    found = []
    for match in SELECTOR.finditer(expression):
        before = re.search(r"(\w+)\($", expression[: match.start()])
        matchers = match["matchers"] or ""
        labels = tuple(label for label, _ in MATCHER.findall(matchers))
        assert MATCHER.sub("", matchers).strip(",") == "", f"matchers {matchers}"
        found.append(Selector(match["name"], labels, before[1] if before else "", bool(match["range"])))
    return found


def problems(template: str) -> list[str]:
    """What is wrong with a panel's expression, under each of the prefixes that the dashboard may be set to."""
    found = [] if template.count("(") == template.count(")") else ["parentheses"]
    for names in NAMES:
        expression = template.replace("${names}", names).replace("$__rate_interval", "1m")
        known, used = series(names), selectors(expression)
        if not used:
            found.append("names no metric")
        for one in used:
            found += _problems_of(one, known)
        allowed = {label for one in used if one.name in known for label in (*ALWAYS, *known[one.name].labels)} | {"le"}
        for grouping in re.findall(r"(?:by|ignoring|on) \(([^)]*)\)", expression):
            found += [f"groups by {label}" for label in re.split(r", *", grouping) if label not in allowed]
        rest = SELECTOR.sub("", re.sub(r"(?:by|ignoring|on) \([^)]*\)", "", expression))
        words = set(re.findall(r"[a-z_]+", rest))
        found += [f"what is {word}?" for word in sorted(words - FUNCTIONS - KEYWORDS)]
    return sorted({*found})


def _problems_of(one: Selector, known: dict[str, Metric]) -> list[str]:
    if one.name not in known:
        return [f"no metric {one.name}"]
    metric = known[one.name]
    labels = {*ALWAYS, *metric.labels, *(["le"] if one.name.endswith("_bucket") else [])}
    found = [f"{one.name} has no label {label}" for label in one.labels if label not in labels]
    if (one.function in OF_RANGES) != one.is_range:
        found.append(f"{one.name}: a range and {one.function or 'no function'}")
    if (metric.kind == "gauge") == one.is_range:
        found.append(f"{one.name} is a {metric.kind}")
    return found
