"""What all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]


@pytest.fixture(params=["off", "dual"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `overlapped.Mode`: the test runs without overlap and with it."""
    from overlapped import mode

    return mode(request.param, monkeypatch)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `checkpoints.make` writes, once per session."""
    return tmp_path_factory.mktemp("checkpoints")
