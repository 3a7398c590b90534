"""Memory that nobody wrote, pages of the KV cache among it, reaches no answer: on the CPU, in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bf16_answers import Judge, small
from gloo_groups import Groups
from nan_answers import SpoiltGroups, assert_nan_changes_nothing


@pytest.fixture(scope="module")
def spoilt() -> Iterator[SpoiltGroups]:
    made = SpoiltGroups()
    yield made
    made.close()


def test_nan_in_unset_memory(groups: Groups, spoilt: SpoiltGroups, tmp_path: Path) -> None:
    judge = Judge(small("deepseek-v3"), tmp_path, "cpu")
    options = {"dtype": "bfloat16", "max_model_len": 256, "enable_prefix_caching": False}
    assert_nan_changes_nothing(judge, groups, spoilt, **options)
