"""The schedule: what the data says is what runs, in the order of the contract, whatever executor, cut or transport."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from checkpoints import make
from hypothesis import given, settings
from hypothesis import strategies as st
from test_executor import Bench

from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.schedule import (
    HAND_OVER_FIRST,
    LAUNCH_FIRST,
    PHASES,
    Launch,
    Schedule,
    choose,
    hidden_under,
    launch_order,
)
from hocket.trace.spans import COMM, Recorder, Stage

CPU = torch.device("cpu")
S = Stage


def steady(schedule: Schedule, *, is_apart: bool) -> list[str]:
    """One layer of many, from its first dispatch to the next layer's."""
    order = launch_order(schedule, num_ubatches=2, num_layers=4, is_apart=is_apart, has_shared=True)
    first = order.index(Launch(S.DISPATCH, 0, 1, "send"))
    last = order.index(Launch(S.DISPATCH, 0, 2, "send"))
    return [launch.text(1) for launch in order[first:last]]


def test_steady_state_is_that_of_the_contract() -> None:
    assert steady(LAUNCH_FIRST, is_apart=True) == [
        "D₀ send", "A0₁", "A1₁", "D₀ recv", "D₁ send", "M₀", "D₁ recv", "C₀ send", "S₀", "M₁", "C₀ recv", "C₁ send",
        "S₁", "A0₀⁺", "A1₀⁺", "C₁ recv",
    ]  # fmt: skip
    compute = [name for name in steady(HAND_OVER_FIRST, is_apart=False) if name[0] in "AMS"]
    assert compute == ["M₀", "M₁", "S₀", "S₁", "A0₀⁺", "A1₀⁺", "A0₁⁺", "A1₁⁺"]


def test_both_ends() -> None:
    order = launch_order(LAUNCH_FIRST, num_ubatches=2, num_layers=2, is_apart=True, has_shared=True)
    assert [launch.text() for launch in order[:3]] == ["A0₀", "A1₀", "D₀ send"]
    assert order[-1] == Launch(S.COMBINE, 1, 1, "recv"), "ubatch 0 runs the last receive on leaving"


def hidden(schedule: Schedule, *, is_apart: bool) -> dict[str, list[str]]:
    """Compute by the transfer that it hides, in the second layer of three."""
    order = launch_order(schedule, num_ubatches=2, num_layers=3, is_apart=is_apart, has_shared=True)
    return {send.text(1): [c.text(1) for c in compute] for send, compute in hidden_under(order) if send.layer == 1}


@pytest.mark.parametrize("schedule", [LAUNCH_FIRST, HAND_OVER_FIRST])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_nothing_is_hidden_by_what_waits_for_it(schedule: Schedule, n: int) -> None:
    order = launch_order(schedule, num_ubatches=n, num_layers=4, is_apart=False, has_shared=True)
    found = hidden_under(order)
    assert [send for send, _ in found] == [launch for launch in order if launch.part == "send"]
    for send, compute in found:
        waits = Launch(S.EXPERTS, send.ubatch, send.layer), Launch(S.QKV, send.ubatch, send.layer + 1)
        assert waits[send.stage is S.COMBINE] not in compute


def test_what_hides_what() -> None:
    assert hidden(LAUNCH_FIRST, is_apart=True) == {
        "D₀ send": ["A0₁", "A1₁"],
        "D₁ send": ["M₀"],
        "C₀ send": ["S₀", "M₁"],
        "C₁ send": ["S₁", "A0₀⁺", "A1₀⁺"],
    }
    # Launched after the hand-over, a transfer hides what was queued before it: never what needs its own result.
    assert hidden(HAND_OVER_FIRST, is_apart=False) == {
        "D₀ send": ["A0₁", "A1₁"],
        "D₁ send": ["M₀"],
        "C₀ send": ["M₁"],
        "C₁ send": ["S₀", "S₁", "A0₀⁺", "A1₀⁺"],
    }


@pytest.mark.parametrize(
    "layer",
    [
        (S.QKV, S.ATTENTION, S.EXPERTS, S.DISPATCH, S.COMBINE, S.SHARED),
        (S.QKV, S.HAND_OVER, S.ATTENTION, S.DISPATCH, S.EXPERTS, S.COMBINE, S.SHARED),
        (S.QKV, S.ATTENTION, S.DISPATCH, S.EXPERTS, S.COMBINE),
        (S.QKV, S.ATTENTION, S.DISPATCH, S.EXPERTS, S.SHARED, S.COMBINE, S.SHARED),
        (S.SHARED, S.QKV, S.ATTENTION, S.DISPATCH, S.EXPERTS, S.COMBINE),
    ],
)
def test_illegal_orders_are_refused(layer: tuple[Stage, ...]) -> None:
    known = "planted: (stages must come as A0 A1 D M C|the shared experts must run once)"
    with pytest.raises(ValueError, match=known):
        Schedule("planted", layer)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any legal one: hand-overs anywhere behind attention, the shared experts too."""
    tail = [S.DISPATCH, S.EXPERTS, S.COMBINE]
    tail.insert(draw(st.integers(0, 3)), S.SHARED)
    for _ in range(draw(st.integers(0, 5))):
        tail.insert(draw(st.integers(0, len(tail))), S.HAND_OVER)
    return Schedule("drawn", (S.QKV, S.ATTENTION, *tail))


@settings(deadline=None)
@given(schedules(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_legal_order_keeps_the_invariants(
    schedule: Schedule, n: int, layers: int, is_apart: bool, has_shared: bool
) -> None:
    order = launch_order(schedule, num_ubatches=n, num_layers=layers, is_apart=is_apart, has_shared=has_shared)
    at = {launch: i for i, launch in enumerate(order)}
    assert len(at) == len(order) == n * layers * (5 + has_shared + 2 * is_apart), "each once"
    for ubatch, layer in itertools.product(range(n), range(layers)):
        chain = [
            Launch(S.ATTENTION, ubatch, layer),
            Launch(S.DISPATCH, ubatch, layer, "send"),
            *([Launch(S.DISPATCH, ubatch, layer, "recv")] if is_apart else []),
            Launch(S.EXPERTS, ubatch, layer),
            Launch(S.COMBINE, ubatch, layer, "send"),
            *([Launch(S.COMBINE, ubatch, layer, "recv")] if is_apart else []),
            *([Launch(S.QKV, ubatch, layer + 1)] if layer + 1 < layers else []),
        ]
        assert [at[launch] for launch in chain] == sorted(at[launch] for launch in chain)
        if ubatch and layer:
            # A request cut in two reads in ubatch i what ubatch i - 1 wrote in the same layer.
            assert at[Launch(S.ATTENTION, ubatch - 1, layer)] < at[Launch(S.ATTENTION, ubatch, layer)]


def test_the_choice() -> None:
    for phase in PHASES:
        for launch_blocks, has_own_thread in ((False, False), (False, True), (True, True)):
            assert choose(phase, launch_blocks=launch_blocks, has_own_thread=has_own_thread) is LAUNCH_FIRST
        assert choose(phase, launch_blocks=True, has_own_thread=False) is HAND_OVER_FIRST


@pytest.fixture(scope="module", params=["v2", "qwen3"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make(request.param, tmp_path_factory.mktemp("checkpoints")))


@pytest.fixture(params=[(kind, n) for kind in EXECUTORS for n in (1, 2, 3, 4)], ids=str)
def executor(request: pytest.FixtureRequest, bench: Bench) -> Iterator[tuple[UBatchExecutor, int]]:
    kind, n = request.param
    made = UBatchExecutor(bench.model, kind, n, 10.0, CPU)
    yield made, n
    made.close()


THREE_TURNS = Schedule(
    "drawn", (S.QKV, S.ATTENTION, S.DISPATCH, S.SHARED, S.HAND_OVER, S.HAND_OVER, S.EXPERTS, S.COMBINE, S.HAND_OVER)
)


@pytest.mark.parametrize("schedule", [LAUNCH_FIRST, HAND_OVER_FIRST, THREE_TURNS], ids=["launch", "hand", "three"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_what_ran_is_what_the_data_says(
    bench: Bench, executor: tuple[UBatchExecutor, int], schedule: Schedule, is_apart: bool
) -> None:
    run, n = executor
    whole = bench.run(run, 1)
    run.schedules["prefill"] = schedule
    run.recorder = Recorder()
    plain = [layer.transport for layer in bench.layers]
    for layer in bench.layers:
        layer.transport = LinkEmulator(layer.transport, 0.0, 1.0) if is_apart else layer.transport
    try:
        torch.testing.assert_close(bench.run(run, n), whole, atol=1e-5, rtol=0)
    finally:
        for layer, transport in zip(bench.layers, plain, strict=True):
            layer.transport = transport
    expected = launch_order(
        schedule,
        num_ubatches=n,
        num_layers=len(bench.layers),
        is_apart=is_apart,
        has_shared=bench.layers[0].shared_experts is not None,
    )
    assert ran(run.recorder) == expected


def ran(recorder: Recorder) -> list[Launch]:
    """The launches recorded: without packing, what follows the last layer, and the second A0, A1 of dense layers."""
    found: dict[Launch, None] = {}
    last = max(span.layer for span in recorder.spans if span.stage is S.EXPERTS)
    for span in recorder.spans:
        is_packing = span.stage in (S.DISPATCH, S.COMBINE) and span.lane != COMM
        if span.layer <= last and span.part != "flight" and not is_packing:
            found.setdefault(Launch(span.stage, span.ubatch, span.layer, span.part))
    return list(found)


def test_spans_cover_the_step(bench: Bench, executor: tuple[UBatchExecutor, int]) -> None:
    """Every span has both ends, and no two ubatches compute at the same time."""
    run, n = executor
    run.recorder = Recorder()
    bench.run(run, n)
    spans = run.recorder.spans
    assert {span.ubatch for span in spans} == set(range(n))
    assert all(0 < span.start_ns <= span.stop_ns for span in spans)
    compute = sorted((s.start_ns, s.stop_ns) for s in spans if s.lane != COMM)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(compute))
    count = len(spans)
    run.recorder = None
    bench.run(run, n)
    assert len(spans) == count, "nobody records"
