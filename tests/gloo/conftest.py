"""Fixtures of the tests that run several ranks."""

from collections.abc import Iterator

import pytest
from faulty import fault_file
from gloo_groups import Groups
from rank_fixtures import checkpoints
from ranks import RankPool

CACHE_BYTES = 32 << 20
"""Of a rank: room for 26 requests of the longest kind. By itself an engine takes up to half a gigabyte, and to zero
that on a CPU takes longer than all else at its start."""

__all__ = ["checkpoints", "fault_file", "groups"]


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    made = Groups(kv_cache_memory_bytes=CACHE_BYTES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks without an engine, three of them; modules that need another number have their own."""
    ranks = RankPool(3)
    yield ranks
    ranks.close()
