"""Each lane of a step alone, on one rank: what runs, how often, with which rows; also where it would be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graphs_on_cpu
import pytest
import torch
from checkpoints import make
from graphs_on_cpu import KeepingPool
from in_process import engine_of, in_process_llm
from torch import Tensor

from hocket.channel.messages import TimeLanes
from hocket.errors import CapacityError
from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.moe.transport.local import LocalTransport
from hocket.ubatch.transfer import Transfer
from hocket.worker import lane_times
from hocket.worker.capture import WARM_UPS, unlimited
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
        found.append(len(inputs.token_ids))
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
def test_all_ranks_are_at_the_same_lane(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet before each one runs, also where it runs for the first time."""
    seen: list[str] = []

    def limit(what: str) -> Any:
        seen.append(what.split()[2])
        return nullcontext()

    monkeypatch.setattr(LaneTimes, "_meet", lambda self: seen.append("meet"))
    asked = TimeLanes(phase="prefill", num_tokens=12, length=6, repeats=1, count=1)
    LaneTimes(runner, asked, limit).measure()
    once = [lane for name in NAMES for lane in (name.split("_")[0], "meet")]
    assert seen == once + once


@torch.inference_mode()
def test_lanes_of_a_decode_have_the_rows_of_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where the graph is; padding reaches no expert. A replay runs its work again (`graphs_on_cpu.py`)."""
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    monkeypatch.setattr(lane_times, "GraphPool", KeepingPool)
    options: dict[str, Any] = {"max_num_seqs": 24, "cudagraph_capture_sizes": "16"}
    with graphs_on_cpu.in_this_process(), in_process_llm(make("v2", tmp_path), **options) as llm:
        runner = engine_of(llm).runner
        found, experts = calls(runner, monkeypatch), ids_of_experts(runner, monkeypatch)
        asked = TimeLanes(phase="decode", num_tokens=11, length=20, repeats=1, count=2)
        times = LaneTimes(runner, asked, unlimited)
        assert times.captured
        us = times.measure()
        assert list(us) == NAMES
        assert all(min(values) > 0 for values in us.values())
        runs = 1 + WARM_UPS + 1 + 2  # with transfers, captured, and two that are timed
        assert Counter(found) == {16: runs, 8: 2 * runs}
        layers = sum(runner.config.model.moe.layers)
        assert Counter(experts) == {11: layers * runs, 8: layers * runs, 3: layers * runs}
        larger = TimeLanes(phase="decode", num_tokens=17, length=20, repeats=1, count=1)
        assert not LaneTimes(runner, larger, unlimited).captured, "no graph holds so many"


def ids_of_experts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that reach experts, of each call of theirs."""
    found: list[int] = []
    layers = [module for module in runner.model.modules() if isinstance(module, MoELayer)]
    [backend] = {type(layer.experts) for layer in layers}
    real = backend.forward

    def forward(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found.append(int((ids >= 0).any(-1).sum()))
        return real(self, x, ids, weights)

    monkeypatch.setattr(backend, "forward", forward)
    return found


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
