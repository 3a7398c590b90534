"""What a hand-over between ubatches costs, per executor. Knows only the batons."""

from __future__ import annotations

import time
from typing import Any

from hocket.bench.report import check_output, emit, provenance, spread
from hocket.config.backends import EXECUTORS
from hocket.ubatch.baton import Baton

LIMIT_S = 60.0


def run(*, num_ubatches: int, num_hand_overs: int, repeats: int, output: str | None) -> dict[str, Any]:
    """Measure each executor `repeats` times in turn, after one run to warm up; print figures and, last, JSON."""
    check_output(output)
    import torch

    from hocket.overlap.thread_state import make_baton  # as the engine makes them

    batons = {name: make_baton(name, num_ubatches, LIMIT_S, torch.device("cpu")) for name in EXECUTORS}
    found: dict[str, list[float]] = {name: [] for name in batons}
    for repeat in range(repeats + 1):
        for name, baton in batons.items():
            cost = _one_run(baton, num_ubatches, num_hand_overs)
            if repeat:
                found[name].append(cost)
    for baton in batons.values():
        baton.close()
    rows: list[dict[str, Any]] = []
    for name, costs in found.items():
        figures = spread(costs)
        rows.append({"executor": name, "num_ubatches": num_ubatches, "handover_us": figures})
        print(
            f"{name:>8}: {figures['median']:8.3f} µs per hand-over [{figures['min']:.3f} – {figures['max']:.3f}], "
            f"{num_ubatches} ubatches, median of {repeats} runs"
        )
    report = provenance("handover") | {"rows": rows}
    emit(report, output)
    return report


def _one_run(baton: Baton, num_ubatches: int, num_hand_overs: int) -> float:
    """µs per hand-over."""
    rounds = max(1, num_hand_overs // num_ubatches)

    def body(idx: int) -> None:
        for _ in range(rounds):
            baton.hand_over(idx)

    started = time.perf_counter()
    baton.run([lambda idx=idx: body(idx) for idx in range(num_ubatches)])  # type: ignore[misc]
    return (time.perf_counter() - started) / (rounds * num_ubatches) * 1e6
