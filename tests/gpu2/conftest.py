"""Tests that need two NVIDIA GPUs: where there are fewer none of them is collected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkpoints as checkpoint_maker
from gloo_groups import Groups

if torch.cuda.device_count() < 2:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints(name)` → folder of a tiny random model, written once per session."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda name, layout="published": checkpoint_maker.make(name, root, layout)
