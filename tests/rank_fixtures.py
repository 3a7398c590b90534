"""Fixtures of all tests that run ranks, on whatever device; imported by the conftest of each such folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints as checkpoint_maker
import pytest
from gloo_groups import Groups


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints(name, layout)` → folder of a tiny random model, written once per session."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda name, layout="published": checkpoint_maker.make(name, root, layout)
