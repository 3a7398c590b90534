"""What torch keeps per thread survives interleaving, and a hand-over inside an operator is refused, not fatal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hocket.overlap.executor import EXECUTORS
from hocket.overlap.thread_state import make_baton
from hocket.ubatch.baton import Baton

CPU = torch.device("cpu")
LIMIT_S = 10.0
ROUNDS = 4
State = Callable[[], AbstractContextManager[Any]]
STATES: dict[str, State] = {
    "as it was": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "grad outside of inference": lambda: Both(torch.inference_mode(False), torch.enable_grad()),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class Both(AbstractContextManager[None]):
    def __init__(self, outer: Any, inner: Any) -> None:
        self.parts = (outer, inner)

    def __enter__(self) -> None:
        for part in self.parts:
            part.__enter__()

    def __exit__(self, *args: Any) -> None:
        for part in reversed(self.parts):
            part.__exit__(*args)


def seen() -> tuple[Any, ...]:
    """The flags, and what torch makes of them: kinds of tensors, and the dtype of a product."""
    x = torch.ones(2, 2, requires_grad=not torch.is_inference_mode_enabled())
    y = x @ x
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return *flags, y.requires_grad, y.is_inference(), y.dtype


@pytest.fixture(params=EXECUTORS)
def baton(request: pytest.FixtureRequest) -> Iterator[Baton]:
    made = make_baton(request.param, 3, LIMIT_S, CPU)
    yield made
    made.close()


@pytest.mark.parametrize("outside", ["as it was", "inference"])
@pytest.mark.parametrize("first", STATES)
@pytest.mark.parametrize("second", STATES)
def test_each_ubatch_keeps_its_state(baton: Baton, outside: str, first: str, second: str) -> None:
    """Entered and left while others are within theirs; who has entered none sees the executor's."""
    names = (first, second, "as it was")
    with torch.inference_mode(), STATES["as it was"]():
        base_of_threads = seen()
    expected = {}
    with STATES[outside]():
        base = seen()

    def body_of(idx: int) -> Callable[[], list[tuple[Any, ...]]]:
        def body() -> list[tuple[Any, ...]]:
            found = [seen()]
            with STATES[names[idx]]():
                for _ in range(ROUNDS + idx):  # they leave at different times
                    found.append(seen())
                    baton.hand_over(idx)
                    found.append(seen())
            baton.hand_over(idx)
            return [*found, seen()]

        return body

    own_base = base if "Greenlet" in type(baton).__name__ else base_of_threads
    for idx, name in enumerate(names):
        with torch.inference_mode(own_base[1]), STATES[name]():
            expected[idx] = [own_base, *[seen()] * (2 * (ROUNDS + idx)), own_base]
    with STATES[outside]():
        outcomes = baton.run([body_of(idx) for idx in range(3)])
        assert seen() == base
    assert {idx: outcome.value for idx, outcome in enumerate(outcomes)} == expected


def test_ranges_of_the_profiler_stay_whole(baton: Baton) -> None:
    """Ranges of two ubatches that overlap in time: each is there once, and in order."""

    def body_of(idx: int) -> Callable[[], None]:
        def body() -> None:
            with record_function(f"outer {idx}"):
                for part in range(ROUNDS):
                    with record_function(f"inner {idx} {part}"):
                        torch.ones(4) + 1
                        baton.hand_over(idx)

        return body

    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # workers are older than the profile
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as found:
        outcomes = baton.run([body_of(idx) for idx in range(2)])
    assert [outcome.error for outcome in outcomes] == [None, None]
    events = {event.name: event for event in found.events() if event.name.startswith(("outer", "inner"))}
    assert len(events) == 2 * (ROUNDS + 1)
    for idx in range(2):
        outer = events[f"outer {idx}"].time_range
        starts = [events[f"inner {idx} {part}"].time_range.start for part in range(ROUNDS)]
        assert starts == sorted(starts)
        assert outer.start <= starts[0]
        assert events[f"inner {idx} {ROUNDS - 1}"].time_range.end <= outer.end
    assert events["inner 1 0"].time_range.start < events["inner 0 0"].time_range.end, "they overlapped"


INSIDE_AN_OPERATOR = """
import sys, torch
from hocket.errors import HocketError
from hocket.overlap.thread_state import make_baton
from hocket.trace.spans import Stage
from hocket.ubatch import context as ubatch
from hocket.ubatch.context import UBatchContext
from hocket.ubatch.lanes import InlineLane
from hocket.ubatch.transfer import Running, Transfer

def transfer(x):
    ubatch.refuse_inside_operator()
    running = Running(Transfer(lambda: None, lambda: x + 1, lambda: 0), Stage.DISPATCH)
    running.hand_over()
    return running.finish(Stage.EXPERTS)

@torch.library.custom_op("hocket_test::sparse", mutates_args=())
def as_custom_op(x: torch.Tensor) -> torch.Tensor:
    return transfer(x)

library = torch.library.Library("hocket_test", "FRAGMENT")
library.define("sparse2(Tensor x) -> Tensor")
library.impl("sparse2", transfer, "CompositeExplicitAutograd")
kinds = {"custom_op": as_custom_op, "library": torch.ops.hocket_test.sparse2}

def split(executor, call, size=2):
    baton, contexts = make_baton(executor, 2, 10.0, torch.device("cpu")), []
    for idx in range(size):
        contexts.append(UBatchContext(idx, baton, InlineLane(), contexts))
    def body(context):
        ubatch.enter(context)
        return call(torch.zeros(3))
    outcomes = baton.run([lambda c=c: body(c) for c in contexts])
    baton.close()
    return outcomes

with torch.inference_mode():
    for executor in ("greenlet", "thread"):
        for name, call in kinds.items():
            errors = [outcome.error for outcome in split(executor, call)]
            assert all(isinstance(error, HocketError) for error in errors), errors
            print(executor, name, errors[0])
        assert [o.value.tolist() for o in split(executor, transfer)] == [[1.0] * 3] * 2
    for call in kinds.values():  # without overlap it is allowed
        assert call(torch.zeros(3)).tolist() == [1.0] * 3
print("alive")
"""


def test_a_hand_over_inside_an_operator_is_refused() -> None:
    """In a process of its own: unrefused, the first case ends it by a signal."""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", INSIDE_AN_OPERATOR], capture_output=True, text=True, timeout=60, cwd=root
    )
    assert done.returncode == 0, done.stderr
    *refusals, last = done.stdout.splitlines()
    assert last == "alive"
    assert len(refusals) == 4
    assert all("inside a torch operator (torch.library.custom_op or the like)" in line for line in refusals)
