"""The lines a rank writes about its steps, and the counters behind them."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.config.engine import OverlapConfig
from hocket.envs import LOG_INTERVAL
from hocket.errors import ConfigError
from hocket.overlap.vote import NUM_ROWS, GraphReason, Reason, Row, StepPlan, decide
from hocket.scheduler.scheduler import SchedulerCounters
from hocket.ubatch.times import StepTimes, Traffic
from hocket.worker import step_log
from hocket.worker.stats import MOST_CUTS, OTHERS, StepRecord, StepStats, overlap_line
from hocket.worker.step_log import WARN_AFTER_STEPS, StepLog, step_line

INTERVAL_S = LOG_INTERVAL.get_int(0)
NOTHING: dict[str, Any] = dict.fromkeys(SchedulerCounters.__slots__, 0)
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
    times = StepTimes(Traffic(1_500_000, 500_000, 30), Traffic(500_000, 0, 20), hand_over_ns=40_000)
    return StepRecord(plan, phase, parts, {"forward": 5.0}, times=times, is_timed=True)  # type: ignore[arg-type]


REPLAYED = replace(plan_of(16, 13), graph=GraphReason.GRAPH, graph_tokens=16, bounds=(8, 16))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(step_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (record_of(plan_of(9, 8), 8), "step 7: decode, split, tokens 0:4 4:8 of padded 0:4 4:9, eager"),
        (
            StepRecord(REPLAYED, "decode", REPLAYED.parts(1)),
            "step 7: decode, split, tokens 0:8 8:13 of padded 0:8 8:16, graph of 16",
        ),
        (record_of(plan_of(9, 0), 0, "idle"), "step 7: idle, split, tokens 0:0 0:0 of padded 0:4 4:9, eager"),
        (record_of(plan_of(2, 3), 2), "step 7: decode, below_threshold, tokens 0:2 of padded 0:3, eager"),
        (record_of(plan_of(0, 0), 0, "idle"), "step 7: idle, no_work, model not run"),
        (record_of(plan_of(9, 9, failed=1), 9, "mixed"), "step 7: mixed, step_dropped, model not run"),
    ],
)
def test_a_line_per_step(record: StepRecord, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, step_log.logger.name):
        StepLog(1, TWO, lambda: SchedulerCounters(**NOTHING)).step(record, ends_run=False)
    assert caplog.messages == [line]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said since the last call."""
    found = list(caplog.messages)
    caplog.clear()
    return found


def test_a_line_per_interval(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    """Tokens by the time in steps, the most requests and blocks at once, totals by how much they grew."""
    found = [
        SchedulerCounters(**{**NOTHING, "num_running": 3, "num_waiting": 2, "kv_usage": 0.25}),
        SchedulerCounters(**{**NOTHING, "num_running": 5, "num_prefix_queries": 80, "num_prefix_hits": 20}),
        SchedulerCounters(**{**NOTHING, "num_running": 4, "num_prefix_queries": 80, "num_prefix_hits": 20}),
        SchedulerCounters(**{**NOTHING, "num_prefix_queries": 90, "num_prefix_hits": 25, "num_preemptions": 2}),
        SchedulerCounters(**{**NOTHING, "num_prefix_queries": 90, "num_prefix_hits": 25, "num_preemptions": 2}),
    ]
    left = iter(found)
    log = StepLog(0, TWO, lambda: next(left))
    split, small = record_of(plan_of(8, 8), 8), record_of(plan_of(2, 8), 2)
    with caplog.at_level(logging.INFO, step_log.logger.name):
        for record in (split, small):
            log.count_tokens(30, 4)
            log.step(record, ends_run=False)
        clock[0] += INTERVAL_S - 0.1
        assert not lines_of(caplog)
        clock[0] += 0.1
        log.step(record_of(plan_of(8, 8, refusal=Reason.PREFIX_HAZARD), 8), ends_run=False)
        # Steps of 5 µs each.
        assert lines_of(caplog) == [
            "up to 5 requests running, 2 waiting; 4,000,000 prompt + 533,333 generated tokens/s; KV cache up to 25.0%; "
            "prefix hits 25.0% of 80 tokens; "
            "overlap: split 1/3 steps (below_threshold 1, prefix_hazard 1), exposed comm 0.50 of 2.00 ms/step"
        ]
        log.count_tokens(0, 1)
        for _ in range(2):
            log.step(split, ends_run=False)
        log.close()
    assert lines_of(caplog) == [
        "up to 0 requests running, 0 waiting; 0 prompt + 100,000 generated tokens/s; KV cache up to 0.0%; "
        "prefix hits 50.0% of 10 tokens; 2 preemptions; "
        "overlap: split 2/2 steps, exposed comm 0.50 of 2.00 ms/step"
    ]


def test_the_end_of_a_run_is_said_but_not_of_each_in_a_row(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    """Many short runs have one line per interval; whatever was not said comes with the next one or at the end."""
    log = StepLog(0, TWO, lambda: SchedulerCounters(**NOTHING))
    split, idle = record_of(plan_of(8, 8), 8), record_of(plan_of(0, 0), 0, "idle")
    with caplog.at_level(logging.INFO, step_log.logger.name):
        log.step(split, ends_run=True)
        assert "split 1/1" in lines_of(caplog)[0]
        for _ in range(3):
            log.step(split, ends_run=True)
        log.step(idle, ends_run=True)
        assert not lines_of(caplog)
        clock[0] += 1000.0  # nobody asks anything
        log.step(split, ends_run=False)
        assert "split 4/5 steps (no_work 1)" in lines_of(caplog)[0]
        log.step(split, ends_run=True)
        assert not lines_of(caplog)
        log.close()
        assert "split 1/1" in lines_of(caplog)[0]
        log.close()
        for _ in range(2):  # nothing ran: nothing to say
            clock[0] += 1000.0
            log.step(idle, ends_run=False)
            log.step(idle, ends_run=True)
        log.close()
    assert not lines_of(caplog)


def test_the_interval_is_the_users(
    caplog: pytest.LogCaptureFixture, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(seconds: str) -> int:
        monkeypatch.setenv(LOG_INTERVAL.name, seconds)
        log = StepLog(0, TWO, lambda: SchedulerCounters(**NOTHING))
        with caplog.at_level(logging.INFO, step_log.logger.name):
            for _ in range(13):
                log.step(record_of(plan_of(8, 8), 8), ends_run=False)
                clock[0] += 1.0
            log.close()
        return len(lines_of(caplog))

    assert (lines("5"), lines("2"), lines("0")) == (3, 5, 0)
    with pytest.raises(ConfigError, match=r"HOCKET_LOG_INTERVAL: '1\.5' is not allowed"):
        lines("1.5")


def test_nothing_is_built_while_the_level_is_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StepLog(0, TWO, lambda: pytest.fail("the scheduler was asked"))
    for name in ("step_line", "overlap_line", "interval_line", "Interval"):
        monkeypatch.setattr(step_log, name, None)  # calling it would raise
    with caplog.at_level(logging.WARNING, step_log.logger.name):
        log.step(record_of(plan_of(8, 8), 8), ends_run=True)
    assert not caplog.messages


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_overlap_in_vain_is_said_once_per_kind_of_step(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(0, TWO, lambda: SchedulerCounters(**NOTHING))
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
    log = StepLog(0, TWO, lambda: SchedulerCounters(**NOTHING))
    whole = replace(plan_of(8, 8), reason=Reason.NO_SPLIT_GRAPH, bounds=(8,))
    for _ in range(WARN_AFTER_STEPS):
        log.step(record_of(whole, 8), ends_run=False)
    (message,) = warnings_of(caplog)
    assert "decode steps was split (no_split_graph 1000): decodes replay whole graphs" in message


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
    log = StepLog(rank, overlap, lambda: SchedulerCounters(**NOTHING))
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


def test_replays_are_counted_as_split_and_as_nobody_timed_them() -> None:
    stats = StepStats()
    replayed = StepRecord(REPLAYED, "decode", REPLAYED.parts(1), {"forward": 5.0})
    stats.count_step(replayed)
    found = stats.snapshot()
    assert (found["overlap"]["split"], found["overlap"]["ubatch_tokens"], found["graphs"]) == (
        1,
        {"8+5": 1},
        {"graph": 1},
    )
    assert overlap_line(found["overlap"]) == "overlap: split 1/1 steps, comm not timed"
    for _ in range(2):
        stats.count_step(record_of(plan_of(8, 8), 8))
    line = overlap_line(stats.snapshot()["overlap"])
    assert line == "overlap: split 3/3 steps, exposed comm 0.50 of 2.00 ms/step of the 2 that were timed"


def test_cuts_are_listed_until_there_are_many() -> None:
    stats = StepStats()
    for tokens in range(MOST_CUTS + 20):
        for _ in range(2):
            stats.count_step(record_of(plan_of(2 * tokens + 8, 2 * tokens + 8), 2 * tokens + 8))
    found = stats.snapshot()["overlap"]["ubatch_tokens"]
    assert (len(found), found["4+4"], found[OTHERS]) == (MOST_CUTS + 1, 2, 40)
    assert sum(found.values()) == stats.split
