"""What must hold between a rank's step counters, and between those of all ranks. For tests only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hocket.worker import step_log


def reasons_of(rank: dict[str, Any]) -> Counter[str]:
    """Steps by reason, over all phases."""
    found: Counter[str] = Counter()
    for by_reason in rank["overlap"]["reasons"].values():
        found.update(by_reason)
    return found


def assert_add_up(ranks: Sequence[dict[str, Any]], num_ubatches: int = 1) -> Counter[str]:
    """Every step is counted once on every rank, under the reason that all agree on; returns steps by reason."""
    expected = reasons_of(ranks[0])
    for rank in ranks:
        overlap = rank["overlap"]
        assert {phase: sum(by.values()) for phase, by in overlap["reasons"].items()} == {
            phase: count for phase, count in rank["phases"].items() if count
        }
        assert sum(rank["phases"].values()) == rank["steps"] == overlap["steps"]
        assert reasons_of(rank) == expected, "ranks disagree about a reason"
        assert overlap["split"] == expected["split"] == sum(overlap["ubatch_tokens"].values())
        assert all(key.count("+") == num_ubatches - 1 for key in overlap["ubatch_tokens"])
        not_run = expected["no_work"] + expected["step_dropped"]
        # With overlap off a step without work is "disabled" too.
        assert overlap["forwards"] == rank["steps"] - not_run or num_ubatches == 1
    off = {"disabled", "step_dropped"}
    assert set(expected) <= off if num_ubatches == 1 else "disabled" not in expected, expected
    return expected


def warn_soon() -> None:
    """Make this process warn of steps that are never split after 20 of them."""
    step_log.WARN_AFTER_STEPS = 20
