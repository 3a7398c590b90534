"""Puts the steps of several hosts on one clock, by the step exchange that all their ranks have passed. Knows no engine.

Nobody leaves an exchange before everybody has entered it. So of ranks a and b, whose clocks differ by `shift` (what is
to be added to b's times), entered_a ≤ left_b + shift and entered_b + shift ≤ left_a: each exchange gives a lower and an
upper bound, all of them together the narrowest.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.trace.spans import HandOver, Span, Step

Bounds = tuple[int, int]


def align(ranks: Sequence[Sequence[Step]]) -> list[str]:
    """Move the steps of ranks with another clock than rank 0's to that one; what people should know of it, a line for
    each such clock. ranks: by rank the same steps, each as all ranks ran it together.
    """
    by_clock: dict[str, list[int]] = {}
    for rank, steps in enumerate(ranks):
        by_clock.setdefault(steps[0].clock if steps else "", []).append(rank)
    (_, first), *others = by_clock.items()
    said = []
    for _, moved in others:
        lower, upper = bounds([ranks[rank] for rank in first], [ranks[rank] for rank in moved])
        shift = (lower + upper) // 2
        for timed in (one for rank in moved for step in ranks[rank] for one in _parts(step)):
            timed.start_ns, timed.stop_ns = timed.start_ns + shift, timed.stop_ns + shift
        where, error_us = ", ".join(map(str, moved)), abs(upper - lower) / 2e3
        said.append(f"rank {where} on another host, whose clock is known to ±{error_us:,.0f} µs by the step exchange")
    return said


def bounds(here: Sequence[Sequence[Step]], there: Sequence[Sequence[Step]]) -> Bounds:
    """Least and most ns that may have to be added to the times of `there` to be those of `here`."""
    pairs = [
        (one.exchange_ns, other.exchange_ns)
        for steps in here
        for others in there
        for one, other in zip(steps, others, strict=True)
    ]
    return max(a[0] - b[1] for a, b in pairs), min(a[1] - b[0] for a, b in pairs)


def unaligned(ranks: Sequence[Sequence[Step]]) -> list[str]:
    """What to say where ranks of several hosts have no exchange in common."""
    if len({steps[0].clock for steps in ranks if steps}) < 2:
        return []
    return ["lanes of different hosts are not aligned: their ranks step by themselves, each by its own host's clock"]


def _parts(step: Step) -> list[Step | Span | HandOver]:
    return [step, *step.spans, *step.hand_overs]
