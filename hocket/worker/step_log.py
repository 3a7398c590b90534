"""What a rank says of its steps: each one, what an interval was, and whether overlap was asked for in vain.

Knows nothing of how steps run. With the log level off a step costs a comparison or two and builds no text.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate, pairwise

from hocket.config.engine import OverlapConfig
from hocket.overlap.vote import Reason, StepPlan
from hocket.worker.stats import StepRecord, StepStats, add, list_reasons, overlap_line

logger = logging.getLogger(__name__)
INTERVAL_S = 10.0
WARN_AFTER_STEPS = 1000
"""So many steps that could have been split, and none was: worth a warning."""


class StepLog:
    """DEBUG: a line per step. INFO: a line per interval while there is work, and at the end of a run.

    WARNING, from rank 0 only since all decide alike: overlap is on, and no step of a kind was split in the first
    WARN_AFTER_STEPS of that kind, or none at all until the engine ended.
    """

    def __init__(self, rank: int, overlap: OverlapConfig) -> None:
        self._interval: StepStats | None = None
        self._say_at = 0.0
        self._watch = VainWatch(overlap) if rank == 0 and overlap.num_ubatches > 1 else None

    def step(self, record: StepRecord, *, ends_run: bool) -> None:
        """One step has ended; `ends_run`: no rank has any request left."""
        if logger.isEnabledFor(logging.INFO):
            self._say(record, ends_run)
        if self._watch is not None:
            self._watch.step(record.plan)

    def _say(self, record: StepRecord, ends_run: bool) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", step_line(record))
        now = time.monotonic()
        if self._interval is None:
            self._interval, self._say_at = StepStats(), now + INTERVAL_S
        self._interval.count_step(record)
        if ends_run or now >= self._say_at:
            if self._interval.forwards:
                logger.info("%s", overlap_line(self._interval.snapshot()["overlap"]))
            self._interval = None

    def close(self) -> None:
        """The engine ends."""
        if self._watch is not None:
            self._watch.close()


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
            return "decodes replay CUDA graphs, which hold whole steps; that is faster than launching halves"
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
