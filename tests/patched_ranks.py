"""Rank processes that run a function of a test module before anything else, so that tests can change what ranks do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.dist.launcher import RankGroup

TESTS = Path(__file__).resolve().parent


@contextmanager
def patched_ranks(num_ranks: int, patch: str, **environment: str) -> Iterator[RankGroup]:
    """A running group whose ranks called `patch` ("module:function", a module in tests/) when Python started."""
    with patched_environment(patch, **environment):
        group = RankGroup.start(num_ranks, 120.0)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def patched_environment(patch: str, **environment: str) -> Iterator[None]:
    """While this is entered, ranks that start call `patch`."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment_of(patch, **environment).items():
            patched.setenv(name, value)
        yield


def environment_of(patch: str, **values: str) -> dict[str, str]:
    """Environment variables under which a Python process calls `patch` before anything else."""
    path = os.pathsep.join(filter(None, (str(TESTS / "patch_site"), str(TESTS), os.environ.get("PYTHONPATH"))))
    return {"RANK_PATCH": patch, "PYTHONPATH": path, **values}
