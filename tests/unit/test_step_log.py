"""The lines a rank writes about its steps, and the counters behind them."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from hocket.config.engine import OverlapConfig
from hocket.overlap.vote import NUM_ROWS, Reason, Row, StepPlan, decide
from hocket.worker import step_log
from hocket.worker.stats import StepRecord, StepStats, overlap_line
from hocket.worker.step_log import INTERVAL_S, WARN_AFTER_STEPS, StepLog, step_line

TWO = OverlapConfig(num_ubatches=2, decode_token_threshold=4, prefill_token_threshold=8)


def plan_of(
    *tokens: int, decode: bool = True, step: int = 7, refusal: Reason | None = None, failed: int = 0
) -> StepPlan:
    """The plan for ranks with so many tokens each."""
    table = []
    for count in tokens:
        column = [0] * NUM_ROWS
        column[Row.TOKENS], column[Row.STEP], column[Row.ABORT] = count, step, failed
        column[Row.UNIFORM_QUERY] = int(decode and count > 0)
        column[Row.MAY_SPLIT] = 1 if refusal is None or not count else -refusal
        table.append(column)
    return decide(table, TWO)


def record_of(plan: StepPlan, mine: int = 0, phase: str = "decode") -> StepRecord:
    if plan.is_idle or plan.failed is not None:
        return StepRecord(plan, phase)  # type: ignore[arg-type]
    ends = [0, *plan.bounds]
    parts = tuple((min(b, mine) - min(a, mine), b - a) for a, b in pairwise(ends))
    return StepRecord(plan, phase, parts, {"forward": 5.0}, comm_us=2000.0, exposed_us=500.0)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(step_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (record_of(plan_of(9, 8), 8), "step 7: decode, split, tokens 0:4 4:8 of padded 0:4 4:9, eager"),
        (record_of(plan_of(9, 0), 0, "idle"), "step 7: idle, split, tokens 0:0 0:0 of padded 0:4 4:9, eager"),
        (record_of(plan_of(2, 3), 2), "step 7: decode, below_threshold, tokens 0:2 of padded 0:3, eager"),
        (record_of(plan_of(0, 0), 0, "idle"), "step 7: idle, no_work, model not run"),
        (record_of(plan_of(9, 9, failed=1), 9, "mixed"), "step 7: mixed, step_dropped, model not run"),
    ],
)
def test_a_line_per_step(record: StepRecord, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, step_log.logger.name):
        StepLog(1, TWO).step(record, ends_run=False)
    assert caplog.messages == [line]


def test_a_line_per_interval_and_at_the_end_of_a_run(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    log = StepLog(0, TWO)
    split, small = record_of(plan_of(8, 8), 8), record_of(plan_of(2, 8), 2)
    with caplog.at_level(logging.INFO, step_log.logger.name):
        for record in (split, small, small, split):
            log.step(record, ends_run=False)
        assert not caplog.messages
        clock[0] += INTERVAL_S
        log.step(record_of(plan_of(8, 8, refusal=Reason.PREFIX_HAZARD), 8), ends_run=False)
        for record in (split, record_of(plan_of(0, 0), 0, "idle")):
            log.step(record, ends_run=record is not split)
        log.step(record_of(plan_of(0, 0), 0, "idle"), ends_run=True)  # nothing ran: nothing to say
    assert caplog.messages == [
        "overlap: split 2/5 steps (below_threshold 2, prefix_hazard 1), exposed comm 0.50 of 2.00 ms/step",
        "overlap: split 1/2 steps (no_work 1), exposed comm 0.50 of 2.00 ms/step",
    ]


def test_nothing_is_built_while_the_level_is_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step_line", "overlap_line", "StepStats"):
        monkeypatch.setattr(step_log, name, None)  # calling it would raise
    with caplog.at_level(logging.WARNING, step_log.logger.name):
        StepLog(0, TWO).step(record_of(plan_of(8, 8), 8), ends_run=True)
    assert not caplog.messages


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_overlap_in_vain_is_said_once_per_kind_of_step(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(0, TWO)
    decode, idle = record_of(plan_of(3, 8), 3), record_of(plan_of(0, 0), 0, "idle")
    for _ in range(WARN_AFTER_STEPS - 1):
        log.step(decode, ends_run=False)
        log.step(idle, ends_run=False)  # counts for nothing
    assert not warnings_of(caplog)
    for _ in range(WARN_AFTER_STEPS):
        log.step(decode, ends_run=False)
    log.close()
    (message,) = warnings_of(caplog)
    assert f"none of the first {WARN_AFTER_STEPS} decode steps was split (below_threshold 1000)" in message
    assert "--dbo-decode-token-threshold is 4 and the least busy rank never had more than 3" in message
    assert "prefill" not in message
    caplog.clear()
    hazard = record_of(plan_of(8, 8, decode=False, refusal=Reason.PREFIX_HAZARD), 8, "prefill")
    for _ in range(WARN_AFTER_STEPS + 5):
        log.step(hazard, ends_run=False)
    (message,) = warnings_of(caplog)
    assert "prefill steps was split (prefix_hazard 1000)" in message
    assert "send one of each prefix ahead" in message


def test_decodes_that_replay_graphs_are_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(0, TWO)
    whole = replace(plan_of(8, 8), reason=Reason.NO_SPLIT_GRAPH, bounds=(8,))
    for _ in range(WARN_AFTER_STEPS):
        log.step(record_of(whole, 8), ends_run=False)
    (message,) = warnings_of(caplog)
    assert "decode steps was split (no_split_graph 1000): decodes replay CUDA graphs" in message


@pytest.mark.parametrize(
    ("rank", "overlap", "tokens", "said"),
    [
        (0, TWO, (3, 8), True),
        (0, TWO, (4, 8), False),  # split
        (0, TWO, (0, 0), False),  # nothing ever ran
        (1, TWO, (3, 8), False),  # rank 0 speaks for all
        (0, OverlapConfig(), (3, 8), False),  # overlap is off
    ],
)
def test_no_split_at_all_is_said_at_the_end(
    caplog: pytest.LogCaptureFixture, rank: int, overlap: OverlapConfig, tokens: tuple[int, int], said: bool
) -> None:
    log = StepLog(rank, overlap)
    for _ in range(3):
        log.step(record_of(plan_of(*tokens), tokens[0]), ends_run=False)
    log.close()
    assert [message.partition(" (")[0] for message in warnings_of(caplog)] == (
        ["overlap is on, but no step of 3 was split"] if said else []
    )


def test_every_reason_is_counted_and_adds_up() -> None:
    stats = StepStats()
    records = [
        record_of(plan_of(8, 8), 8),
        record_of(plan_of(8, 0), 0, "idle"),
        record_of(plan_of(3, 8), 3),
        record_of(plan_of(0, 0), 0, "idle"),
        record_of(plan_of(8, 8, failed=1), 8, "prefill"),
    ]
    failing = record_of(plan_of(8, 8), 8)
    failing.has_failed = True
    for record in [*records, failing]:
        stats.count_step(record)
    found = stats.snapshot()
    assert found["overlap"]["reasons"] == {
        "decode": {"split": 2, "below_threshold": 1},
        "idle": {"split": 1, "no_work": 1},
        "prefill": {"step_dropped": 1},
    }
    assert found["phases"] == {"prefill": 1, "decode": 3, "mixed": 0, "idle": 2}
    assert (found["steps"], found["failed"]) == (6, 1)
    assert (found["overlap"]["split"], found["overlap"]["forwards"]) == (3, 4)
    assert found["overlap"]["ubatch_tokens"] == {"4+4": 2, "0+0": 1}
    assert found["times_us"]["forward"]["sum"] == 15.0, "a failed step's times are no figures"
    assert overlap_line(found["overlap"]) == (
        "overlap: split 3/6 steps (below_threshold 1, no_work 1, step_dropped 1), exposed comm 0.50 of 2.00 ms/step"
    )
    assert step_line(failing).endswith(", eager, failed")
