"""Fixtures of tests that judge answers of a model of DeepSeek-V2-Lite's widths in bf16."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from bf16_answers import Judge, published
from nan_answers import SpoiltGroups


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """DeepSeek-V2-Lite's widths."""
    from test_bf16 import FEW

    path = tmp_path_factory.mktemp("v2_lite")
    yield Judge(published("deepseek-v2-lite", **FEW), path, "cuda", num_texts=48)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def spoilt() -> Iterator[SpoiltGroups]:
    made = SpoiltGroups()
    yield made
    made.close()
