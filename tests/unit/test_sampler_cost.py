"""What always watches a step costs: each call's CPU time, best of many, times the calls of a step, against the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import greedy
from in_process import engine_of, in_process_llm

from hocket.engine import Engine
from hocket.envs import FORCE_SPLIT
from hocket.llm import LLM
from hocket.moe.layer import MoELayer
from hocket.trace.spans import Recorder, Stage
from hocket.ubatch.times import StepTimes
from hocket.worker.expert_load import EVERY
from hocket.worker.stats import StepRecord

pytestmark = pytest.mark.alone
LIMIT = 0.005
"""Of a step. What is measured is about half of it."""
ROUNDS, RUNS = 2_000, 9
NUM_REQUESTS, NUM_STEPS = 4, 40
"""Small steps: what watches them costs the same in large ones."""


def us_of(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """CPU µs of one call, the loop's own time included."""
    best = float("inf")
    for _ in range(RUNS):
        started = time.process_time()
        for _ in range(rounds):
            call()
        best = min(best, time.process_time() - started)
    return best / rounds * 1e6


def generate(llm: LLM, num_steps: int) -> None:
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(NUM_REQUESTS)]
    llm.generate(prompts, greedy(num_steps), use_tqdm=False)


def spy(engine: Engine) -> tuple[list[StepRecord], list[float]]:
    """The decode steps that are counted from now on, and the CPU µs between the ends of two in a row."""
    found: list[StepRecord] = []
    ends: list[float] = []
    between: list[float] = []
    account = engine._account

    def kept(record: StepRecord) -> None:
        account(record)
        ends.append(time.process_time())
        if record.phase == "decode":
            found.append(record)
            between.append((ends[-1] - ends[-2]) * 1e6)

    engine._account = kept  # type: ignore[method-assign]
    return found, between


def test_watching_a_step_costs_less_than_half_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_SPLIT.name, "2")
    with in_process_llm("tiny") as llm, torch.inference_mode():
        engine = engine_of(llm)
        engine.counters()  # as a scrape does: the load of experts is sampled from now on
        generate(llm, NUM_STEPS)
        records, between = spy(engine)
        generate(llm, NUM_STEPS)
        step_us = min(between)
        recorder = engine.runner.executor.recorder = Recorder(phase="decode", limit=1)
        generate(llm, 4)
        engine.runner.executor.recorder = None
        (step,) = recorder.finished
        layers: list[Any] = [one for one in engine.runner.model.modules() if isinstance(one, MoELayer)]
        costs = costs_us(engine, records[-1], layers[0])
    calls = {
        "step": 1.0,
        "transfer": len([span for span in step.spans if span.part == "flight"]),
        "hand-over": len(step.hand_overs) + 1,
        "expert count": 2 * len(layers) / EVERY,
    }
    assert calls["transfer"] == 2 * 2 * len(layers)
    assert calls["hand-over"] >= 2 * 2 * len(layers)
    total_us = sum(costs[name] * count for name, count in calls.items())
    each = ", ".join(f"{calls[name]:g} × {name} {us:.2f}" for name, us in costs.items())
    print(f"{total_us:.1f} µs of a step of {step_us:,.0f} µs: {total_us / step_us:.2%} ({each} µs)")
    assert total_us < LIMIT * step_us


def costs_us(engine: Engine, record: StepRecord, layer: MoELayer) -> dict[str, float]:
    """By what it is of."""
    assert len(record.ubatches) == 2
    times, ids = StepTimes(), torch.zeros(NUM_REQUESTS // 2, layer.router.config.top_k, dtype=torch.int64)
    load = torch.zeros(layer.router.config.num_experts + 1)

    def step() -> None:
        StepTimes()
        engine.runner.expert_load.begin_step(1)
        engine.stats.count_step(record)

    def hand_over() -> None:
        times.give()
        times.take()

    def transfer() -> None:
        """With the looks at the clock that it takes: the start and end of a send, and when it was asked for."""
        asked = [time.perf_counter_ns() for _ in range(3)]
        times.of(Stage.COMBINE).add(asked[1] - asked[0], max(asked[2] - asked[1], 0), 100)

    return {
        "step": us_of(step),
        "transfer": us_of(transfer),
        "hand-over": us_of(hand_over),
        "expert count": us_of(lambda: layer._count(load, ids), 200),
    }
