"""What a rank says of its steps: each one, what an interval was, and whether overlap was asked for in vain.

Knows nothing of how steps run. With the log level off a step costs a comparison or two and builds no text.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from itertools import accumulate, pairwise

from hocket.config.engine import OverlapConfig
from hocket.envs import LOG_INTERVAL
from hocket.overlap.vote import Reason, StepPlan
from hocket.scheduler.scheduler import SchedulerCounters
from hocket.worker.stats import StepRecord, StepStats, add, list_reasons, overlap_line

logger = logging.getLogger(__name__)
WARN_AFTER_STEPS = 1000
"""So many steps that could have been split, and none was: worth a warning."""


class StepLog:
    """DEBUG: a line per step. INFO: a line per HOCKET_LOG_INTERVAL while there is work. The end of a run says what is
    left at once, unless a line came less than an interval ago: then the next one, or the engine's end, says it too.

    WARNING, from rank 0 only since all decide alike: overlap is on, and no step of a kind was split in the first
    WARN_AFTER_STEPS of that kind, or none at all until the engine ended.

    counters: of this rank's scheduler, as they are now. Raises ConfigError for an interval that is no number.
    """

    def __init__(self, rank: int, overlap: OverlapConfig, counters: Callable[[], SchedulerCounters]) -> None:
        self._interval_s = LOG_INTERVAL.get_int(0)
        self._interval = Interval()
        self._counters = counters
        self._due_at = self._due_at_end = -math.inf
        self._watch = VainWatch(overlap) if rank == 0 and overlap.num_ubatches > 1 else None

    def stop_watching(self) -> None:
        """Somebody says at run time what is split: nothing was asked for in vain."""
        self._watch = None

    def count_tokens(self, prompt: int, generated: int) -> None:
        """Of the step that `step` is about to be told of."""
        self._interval.stats.prompt_tokens += prompt
        self._interval.stats.generated_tokens += generated

    def step(self, record: StepRecord, *, ends_run: bool) -> None:
        """One step has ended; `ends_run`: no rank has any request left."""
        if logger.isEnabledFor(logging.INFO):
            self._say(record, ends_run)
        if self._watch is not None:
            self._watch.step(record.plan)

    def _say(self, record: StepRecord, ends_run: bool) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", step_line(record))
        if not self._interval_s:
            return
        now = time.monotonic()
        if not self._interval.stats.steps:
            self._due_at = now + self._interval_s
        self._interval.step(record, self._counters())
        if now >= (self._due_at_end if ends_run else self._due_at):
            self._end_interval()

    def _end_interval(self) -> None:
        """Say what it was, if anything, and begin another."""
        if self._interval.stats.forwards:
            logger.info("%s", interval_line(self._interval))
            self._due_at_end = time.monotonic() + self._interval_s
        self._interval = Interval(self._interval.last)

    def close(self) -> None:
        """The engine ends."""
        self._end_interval()
        if self._watch is not None:
            self._watch.close()


class Interval:
    """Some steps: their counters, and the most that the scheduler had at once at the end of one. before: its counters
    when they began."""

    def __init__(self, before: SchedulerCounters | None = None) -> None:
        self.stats = StepStats()
        self.before = self.last = before
        self.busy_s = 0.0
        self.num_running = self.num_waiting = 0
        self.kv_usage = 0.0

    def step(self, record: StepRecord, now: SchedulerCounters) -> None:
        """One more, after which the scheduler's counters are `now`."""
        self.stats.count_step(record)
        self.busy_s += sum(record.us.values()) / 1e6
        self.num_running = max(self.num_running, now.num_running)
        self.num_waiting = max(self.num_waiting, now.num_waiting)
        self.kv_usage = max(self.kv_usage, now.kv_usage)
        self.last = now

    def gained(self, name: str) -> int:
        """By how much a total of the scheduler has grown."""
        return int(getattr(self.last, name, 0)) - int(getattr(self.before, name, 0))


def interval_line(interval: Interval) -> str:
    """`up to 8 requests running, 2 waiting; 512 prompt + 88 generated tokens/s; KV cache up to 12.3%; prefix hits 45.0%
    of 900 tokens; overlap: …`. Rates are over the time in steps; prefix hits are of the tokens that were looked up."""
    stats, busy_s = interval.stats, interval.busy_s or math.inf
    queries, preempted = interval.gained("num_prefix_queries"), interval.gained("num_preemptions")
    hits = f"{interval.gained('num_prefix_hits') / queries:.1%} of {queries:,} tokens" if queries else "none looked up"
    parts = [
        f"up to {interval.num_running} requests running, {interval.num_waiting} waiting",
        f"{stats.prompt_tokens / busy_s:,.0f} prompt + {stats.generated_tokens / busy_s:,.0f} generated tokens/s",
        f"KV cache up to {interval.kv_usage:.1%}",
        f"prefix hits {hits}",
        *[f"{preempted} preemptions"] * (preempted > 0),
        overlap_line(stats.snapshot()["overlap"]),
    ]
    return "; ".join(parts)


class VainWatch:
    """Warns once of each kind of step that overlap was asked for and never came to."""

    def __init__(self, overlap: OverlapConfig) -> None:
        self._thresholds = {
            "decode": ("--dbo-decode-token-threshold", overlap.decode_token_threshold),
            "prefill": ("--dbo-prefill-token-threshold", overlap.prefill_token_threshold),
        }
        self._unsplit: dict[str, dict[str, int]] = {kind: {} for kind in self._thresholds}
        self._most = dict.fromkeys(self._thresholds, 0)  # tokens of the working rank that had fewest, below threshold
        self._open = set(self._thresholds)  # kinds never split and not warned of
        self._all_open = True

    def step(self, plan: StepPlan) -> None:
        kind = "decode" if plan.uniform_query else "prefill"  # as the two thresholds tell steps apart
        if kind not in self._open or plan.is_idle or plan.failed is not None:
            return
        if plan.reason is Reason.SPLIT:
            self._close(kind)
            return
        counts = self._unsplit[kind]
        add(counts, plan.reason.label)
        if plan.reason is Reason.BELOW_THRESHOLD:
            self._most[kind] = max(self._most[kind], min(tokens for tokens in plan.num_tokens if tokens))
        if sum(counts.values()) == WARN_AFTER_STEPS:
            self._close(kind)
            self._warn(f"none of the first {WARN_AFTER_STEPS} {kind} steps was split", [kind])

    def close(self) -> None:
        """Warn if nothing at all was split and nothing has been said of it."""
        kinds = [kind for kind, counts in self._unsplit.items() if counts]
        if self._all_open and kinds:
            steps = sum(sum(self._unsplit[kind].values()) for kind in kinds)
            self._warn(f"no step of {steps} was split", kinds)

    def _close(self, kind: str) -> None:
        self._open.discard(kind)
        self._all_open = False

    def _warn(self, what: str, kinds: list[str]) -> None:
        reasons: dict[str, int] = {}
        for kind in kinds:
            for reason, count in self._unsplit[kind].items():
                add(reasons, reason, count)
        logger.warning("overlap is on, but %s (%s): %s", what, list_reasons(reasons), self._advice(kinds, reasons))

    def _advice(self, kinds: list[str], reasons: dict[str, int]) -> str:
        """What to change about the most frequent reason."""
        reason = max(reasons, key=lambda name: reasons[name])
        if reason == Reason.PREFIX_HAZARD.label:
            return "requests read prefixes that others compute in the same step; send one of each prefix ahead"
        if reason == Reason.NO_SPLIT_GRAPH.label:
            return "decodes replay whole graphs: ranks differ too much in requests, or --no-split-graphs was given"
        if reason != Reason.BELOW_THRESHOLD.label:
            return "without a split overlap only costs; leave it off"
        found = [
            f"{name} is {threshold} and the least busy rank never had more than {self._most[kind]}"
            for kind, (name, threshold) in self._thresholds.items()
            if kind in kinds and Reason.BELOW_THRESHOLD.label in self._unsplit[kind]
        ]
        return f"{', '.join(found)}; send more at once, lower the threshold if a split pays there, or leave overlap off"


def step_line(record: StepRecord) -> str:
    """`step 7: decode, split, tokens 0:4 4:8 of padded 0:4 4:9, eager`."""
    plan = record.plan
    line = f"step {plan.step}: {record.phase}, {record.plan.reason.label}"
    if not record.ubatches:
        return f"{line}, model not run"
    real, padded = (_ranges(counts) for counts in zip(*record.ubatches, strict=True))
    graph = f"graph of {plan.graph_tokens}" if plan.graph_tokens else "eager"
    return f"{line}, tokens {real} of padded {padded}, {graph}{', failed' if record.has_failed else ''}"


def _ranges(counts: tuple[int, ...]) -> str:
    return " ".join(f"{start}:{stop}" for start, stop in pairwise((0, *accumulate(counts))))
