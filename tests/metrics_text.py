"""Reads what /metrics shows. For tests only."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families


class Shown:
    """Samples by name and labels."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    def values(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Values of the samples that have these labels, by the labels that are left, engine first."""
        found = {}
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                left = {key: value for key, value in sample.labels.items() if key not in {*labels, "model_name"}}
                found[tuple(left[key] for key in sorted(left, key=lambda key: (key != "engine", key)))] = sample.value
        return found

    def by_engine(self, name: str, of: Callable[..., float] = sum, **labels: str) -> dict[str, float]:
        """`of` the values of each engine."""
        found: dict[str, list[float]] = {}
        for (engine, *_), value in self.values(name, **labels).items():
            found.setdefault(engine, []).append(value)
        return {engine: of(values) for engine, values in found.items()}
