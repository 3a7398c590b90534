"""Whether steps were really split, by the ranks' counters: else two equal runs prove nothing. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.overlap.vote import Reason
from hocket.worker.stats import add, list_reasons

PHASES = ("prefill", "mixed", "decode")


@dataclass(frozen=True)
class Splits:
    """Steps of all ranks by phase, those of them that were split, and why the others were not. A step counts once on
    each rank that had tokens in it. problem: why the run verifies nothing; None: it does."""

    steps: dict[str, int] = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def num_steps(self) -> int:
        return sum(self.steps.values())

    @property
    def num_split(self) -> int:
        return sum(self.split.values())


def check_splits(stats: Sequence[Mapping[str, Any]], num_ubatches: int) -> Splits:
    """stats: what `LLM.stats()` gives after the run. Every kind of step that there was must have been split at least
    once, into `num_ubatches` parts; with 1 no step may be."""
    reasons: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}
    for rank in stats:
        for phase in PHASES:
            for reason, count in rank["overlap"]["reasons"].get(phase, {}).items():
                add(reasons[phase], reason, count)
    steps = {phase: sum(counts.values()) for phase, counts in reasons.items()}
    split = {phase: counts.pop(Reason.SPLIT.label, 0) for phase, counts in reasons.items()}
    cuts = [cut for rank in stats for cut in rank["overlap"]["ubatch_tokens"]]
    return Splits(steps, split, reasons, _problem(steps, split, reasons, cuts, num_ubatches))


def _problem(
    steps: Mapping[str, int],
    split: Mapping[str, int],
    reasons: Mapping[str, Mapping[str, int]],
    cuts: Sequence[str],
    num_ubatches: int,
) -> str | None:
    if not any(steps.values()):
        return "no step was run"
    if num_ubatches == 1:
        return f"{sum(split.values())} steps were split although overlap is off" if any(split.values()) else None
    whole = [phase for phase in PHASES if steps[phase] and not split[phase]]
    if whole:
        named = (f"no {phase} step of {steps[phase]} was split ({list_reasons(reasons[phase])})" for phase in whole)
        more = any(Reason.BELOW_THRESHOLD.label in reasons[phase] for phase in whole)
        return "; ".join(named) + ": ask for more prompts, or longer outputs" * more
    odd = sorted({cut for cut in cuts if cut.count("+") + 1 != num_ubatches})
    return f"steps were not split into {num_ubatches} parts but as {', '.join(odd)}" if odd else None


def not_exercised(splits: Splits, *, longest_prompt: int, step_tokens: int) -> list[str]:
    """What the prompts never led to: kinds of steps, and prompts computed in several steps."""
    missing = [f"{phase} steps" for phase in PHASES if not splits.steps.get(phase)]
    if longest_prompt <= step_tokens:
        sizes = f"the longest prompt has {longest_prompt} tokens, a step {step_tokens}"
        missing.append(f"chunked prefill ({sizes}: see --max-num-batched-tokens)")
    return missing
