"""Fixtures of the tests that run several ranks, and how two workers of pytest share these."""

import pytest
from rank_fixtures import checkpoints, groups

__all__ = ["checkpoints", "groups"]

WAITING = {
    "test_field_cases_hangs",
    "test_launcher",
    "test_leaks_of_ranks",
    "test_odd_starts",
    "test_overlap_faults",
}
"""Files that wait for most of their time, for limits to pass: they run beside all others, which compute."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.path.parent.name == "gloo":
            item.add_marker(pytest.mark.xdist_group("waits" if item.path.stem in WAITING else "computes"))
