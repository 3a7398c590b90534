"""Captured decodes on a CPU: the work that would be captured is kept, and a replay runs it again. For tests only.

All else is what runs on a GPU: inputs and plans on addresses that stay, the vote, the executor that runs ubatches while
they are captured. Ranks call `install` at start (see patched_ranks.py), tests enter `configured`.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import fake_flashinfer
import pytest
import torch

from hocket.attention.flashinfer import FlashInferAttention
from hocket.attention.flashinfer_library import HeadShapes
from hocket.config import resolve
from hocket.config.model import ModelConfig
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.worker import capture

ENVIRONMENT = {"HOCKET_SHARED_EXPERTS_STREAM": "0", "HOCKET_MLA_DECODE": "flashinfer"}


class Kept:
    """Work that a replay runs again."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()

    def replay_us(self, count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            self._work()
        return (time.perf_counter() - started) / count * 1e6


class KeepingPool:
    """In place of a pool of memory for graphs."""

    def capture(self, work: Callable[[], object]) -> Kept:
        for _ in range(capture.WARM_UPS + 1):
            work()
        return Kept(work)

    def taken_bytes(self) -> int:
        return 0


def install() -> None:
    """From now on this process captures, with FlashInfer's stand-in for attention."""
    atexit.register(_entered().close)


def _entered() -> ExitStack:
    """What is patched until it is closed."""
    from hocket.models import backends
    from hocket.worker import graphs

    stack = ExitStack()
    stack.enter_context(fake_flashinfer.installed())
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(graphs, "GraphPool", KeepingPool)
    patch.setattr(LinkEmulator, "captures", True)
    patch.setattr(backends, "attention_backend", _stand_in)
    return stack


def _stand_in(
    name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, on_compile: Any
) -> FlashInferAttention:
    return FlashInferAttention(HeadShapes.of(config), device)


@contextmanager
def configured() -> Iterator[None]:
    """Configurations made meanwhile have graphs on a CPU as they would on a GPU."""
    graphs_of = resolve._graphs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "_graphs", lambda options, device, *others: graphs_of(options, "cuda", *others))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@contextmanager
def in_this_process() -> Iterator[None]:
    """`install` and `configured` for engines in this process, until it is left."""
    with configured(), _entered():
        yield


def install_with_plant() -> None:
    """And what planted_captures.py says fails."""
    import planted_captures

    install()
    planted_captures.install()


def install_slow() -> None:
    """And capturing two ubatches never ends."""
    import slow_capture

    install()
    slow_capture.install_for_two()
