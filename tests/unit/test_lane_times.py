"""Each lane of a step alone, on one rank: what runs, how often, with which rows; also where it would be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import engine_of, in_process_llm
from torch import Tensor

from hocket.attention.plan import AttentionPlan
from hocket.channel.messages import TimeLanes
from hocket.errors import CapacityError
from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.moe.transport.local import LocalTransport
from hocket.ubatch.transfer import Transfer
from hocket.worker import graphs, lane_times
from hocket.worker.capture import unlimited
from hocket.worker.lane_times import LaneTimes
from hocket.worker.runner import Runner

NAMES = ["compute", "compute_halves", "comm", "comm_halves", "output"]


class Sending(Transport):
    """Counts what is sent, by what is timed meanwhile."""

    name = "sending"
    requires_padding = False

    def __init__(self, inner: LocalTransport, seen: Counter[str]) -> None:
        self.inner, self.seen, self.during = inner, seen, ""

    def _counted(self, transfer: Transfer[Any]) -> Transfer[Any]:
        def send() -> None:
            self.seen[self.during] += 1
            transfer.send()

        return Transfer(send, transfer.result, lambda: 100)

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        return self._counted(self.inner.prepare(x, topk_ids, topk_weights, layout))

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        return self._counted(self.inner.finalize(expert_out, handle))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOCKET_FORCE_SPLIT", "2")
        with in_process_llm("tiny", device="cpu", kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=64) as llm:
            yield engine_of(llm).runner


@pytest.fixture
def sent(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Callable[..., Any]]:
    """Sends by lane, and the limit that tells which lane is being timed."""
    seen: Counter[str] = Counter()
    layers = [module for module in runner.model.modules() if isinstance(module, MoELayer)]
    inner = layers[0].transport
    assert isinstance(inner, LocalTransport)
    sending = Sending(inner, seen)
    for layer in layers:
        monkeypatch.setattr(layer, "transport", sending)

    def limit(what: str) -> Any:
        sending.during = what.split()[2]
        return nullcontext()

    return seen, limit


def calls(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of the model."""
    found: list[int] = []
    real = type(runner.model).forward

    def forward(self: Any, inputs: Any, *args: Any) -> Any:
        found.append(inputs.layout.num_tokens)
        return real(self, inputs, *args)

    monkeypatch.setattr(type(runner.model), "forward", forward)
    return found


@torch.inference_mode()
@pytest.mark.parametrize(("phase", "length"), [("decode", 20), ("prefill", 7)])
def test_each_lane_runs_alone(
    runner: Runner, sent: Any, monkeypatch: pytest.MonkeyPatch, phase: str, length: int
) -> None:
    seen, limit = sent
    found = calls(runner, monkeypatch)
    layers = sum(runner.config.model.moe.layers)
    times = LaneTimes(runner, TimeLanes(phase=phase, num_tokens=12, length=length, repeats=2, count=3), limit)
    us = times.measure()
    assert list(us) == NAMES
    assert all(len(values) == 2 and min(values) > 0 for values in us.values())
    assert not times.captured
    whole, halves = layers * 2, layers * 2 * 2
    runs = 1 + 2 * 3  # once before, then two repeats of three
    assert seen == {"": whole + halves, "comm": runs * (whole + halves)}, "compute and output send nothing"
    assert Counter(found) == {12: 1 + runs, 6: 2 * (1 + runs)}
    assert times.num_bytes == {"comm": whole * 100, "comm_halves": halves * 100}


@torch.inference_mode()
def test_captured_lanes(runner: Runner, sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plans on the host that stand for those a graph can hold, and a graph that runs its work at each replay."""
    seen, limit = sent
    attention, plans, captures = runner.model.backends.attention, [], []

    def decode_plan(num_rows: int, *args: Any) -> Any:
        plans.append(object.__new__(AttentionPlan))
        plans[-1].__dict__["num_rows"] = num_rows
        return plans[-1]

    def update(plan: Any, meta: Any) -> None:
        cache = runner.kv_caches[0]
        made = attention.plan(meta, plan.num_rows, cache.shape[1], runner.model.dtype, 1)
        plan.__dict__.update(vars(made))

    class Pool:
        def capture(self, work: Callable[[], object]) -> Any:
            captures.append(work)
            work()
            return SimpleNamespace(replay=work)

    monkeypatch.setattr(type(attention), "decode_plan", staticmethod(decode_plan))
    monkeypatch.setattr(type(attention), "update", staticmethod(update))
    monkeypatch.setattr(lane_times, "GraphPool", Pool)
    monkeypatch.setattr(graphs, "SideStream", lambda device: lane_times.INLINE)
    monkeypatch.setattr(runner, "graph_config", replace(runner.graph_config, sizes=(16,)))
    found = calls(runner, monkeypatch)
    asked = TimeLanes(phase="decode", num_tokens=12, length=20, repeats=1, count=2)
    times = LaneTimes(runner, asked, limit)
    assert times.captured
    assert list(times.measure()) == NAMES
    assert len(captures) == len(NAMES)
    assert [plan.num_rows for plan in plans] == [12, 6, 6], "one for each part, made once"
    assert Counter(found) == {12: 1 + 3, 6: 2 * (1 + 3)}
    assert set(seen) == {"", "comm"}
    larger = TimeLanes(phase="decode", num_tokens=17, length=20, repeats=1, count=1)
    assert not LaneTimes(runner, larger, unlimited).captured, "no graph holds so many"


@torch.inference_mode()
def test_no_lane_alone_leaves_multiprocessors_to_the_other(
    runner: Runner, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entered() -> Any:
        raise AssertionError("something is limited")

    budget = SimpleNamespace(entered=entered)
    monkeypatch.setattr(runner.executor, "budget", budget)
    LaneTimes(runner, TimeLanes(phase="prefill", num_tokens=8, length=8, repeats=1, count=1), sent[1]).measure()
    assert runner.executor.budget is budget


def test_a_step_that_the_cache_cannot_hold_is_named(runner: Runner) -> None:
    asked = TimeLanes(phase="decode", num_tokens=4096, length=64, repeats=1, count=1)
    with pytest.raises(CapacityError, match=rf"takes 16384 cache blocks, and there are {runner.num_blocks}"):
        LaneTimes(runner, asked, unlimited)
