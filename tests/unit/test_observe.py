"""Every message that the front can send reaches somebody in a rank, and only one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, get_args

from hocket.channel.messages import Configure, FrontMessage, GetSpans, RecordSteps, Shutdown, Spans, TimeReplays
from hocket.observe import Observer
from hocket.rank import RankProcess
from hocket.trace.spans import COMPUTE, Span, Stage


def test_every_message_has_one_taker() -> None:
    takers = [Configure, Shutdown, *RankProcess.ORDERS, *Observer.QUESTIONS]
    assert set(takers) == set(get_args(FrontMessage))
    assert len(takers) == len(set(takers))


def observer(**runner: Any) -> Observer:
    scheduler = SimpleNamespace(forget_prefixes=lambda: None)
    engine: Any = SimpleNamespace(runner=SimpleNamespace(**runner), scheduler=scheduler)
    return Observer(engine, 3, nullcontext)


def test_spans_are_given_once() -> None:
    executor = SimpleNamespace(recorder=None, is_on_gpu=False)
    one = observer(executor=executor)
    assert one.answer(RecordSteps(num_steps=2, skip=1, phase="decode")) is None
    step = executor.recorder
    assert (step.limit, step.skip, step.phase) == (2, 1, "decode")
    assert step.begin("decode", 1, 4) is None
    made = step.begin("decode", 1, 4)
    made.stop_ns = made.start_ns + 1
    made.spans.append(Span(COMPUTE, 0, 0, Stage.QKV, "", 1, 2))
    assert one.answer(GetSpans()) == Spans(rank=3, steps=[made])
    assert one.answer(GetSpans()) == Spans(rank=3, steps=[])


def test_replays_wait_until_all_ranks_sleep_and_are_timed_once() -> None:
    asked: list[tuple[int, int]] = []

    def replay_us(count: int) -> float:
        asked.append((8, count))
        return 12.5

    one = observer(graphs={(8, 1): SimpleNamespace(replay_us=replay_us)})
    one.rest()
    assert one.answer(TimeReplays(size=8, count=5)) is None
    assert not asked
    one.rest()
    one.rest()
    assert asked == [(8, 5)]
