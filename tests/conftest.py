"""What all tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests with two threads do not spin beside other programs
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; tests send it to processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """PyTorch computes with so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
