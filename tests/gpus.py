"""What tests need of a machine with GPUs, and what becomes of those that do not get it. For tests only.

HOCKET_TEST_GPUS: how many GPUs there are to be. Then nothing is left out: what is missing fails. Unless it is set,
tests that need more GPUs than there are are not collected, and those of libraries that cannot run here are skipped,
with the reason.
"""

from __future__ import annotations

import os
import time
from typing import NoReturn

import pytest
import torch

DEMANDED = int(os.environ.get("HOCKET_TEST_GPUS", "0"))
FREED_WITHIN_S = 10.0
ROOM_BYTES = 64 << 20
"""By which a GPU's used memory may differ from what it was, whatever drivers keep."""


def left_out(least: int) -> list[str]:
    """What a conftest does not collect where fewer than `least` GPUs are found. Raises UsageError where so many are
    demanded."""
    found = torch.cuda.device_count()
    if found >= least:
        return []
    if least <= DEMANDED:
        raise pytest.UsageError(f"HOCKET_TEST_GPUS is {DEMANDED}, and torch finds {found} GPUs")
    return ["test_*.py"]


def missing(reason: str) -> NoReturn:
    """Skip the running test for this reason; fail it where GPUs are demanded."""
    if DEMANDED:
        pytest.fail(f"HOCKET_TEST_GPUS is set: {reason}")
    pytest.skip(reason)


def used_bytes() -> list[int]:
    """On each of two GPUs, by whatever runs there."""
    found = [torch.cuda.mem_get_info(i) for i in range(2)]
    return [total - free for free, total in found]


def assert_nothing_is_held(before: list[int]) -> None:
    """The GPUs' memory is as it was, at most FREED_WITHIN_S from now."""
    deadline = time.monotonic() + FREED_WITHIN_S
    while (held := max(now - then for now, then in zip(used_bytes(), before, strict=True))) > ROOM_BYTES:
        assert time.monotonic() < deadline, f"{held / 1e6:.0f} MB of a GPU are still taken"
        time.sleep(0.2)
