"""Overlap on a GPU's streams, as far as launches and events tell: what waits for what, what may run beside what, and
that memory on both streams lives until it may be given to others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from checkpoints import make
from fake_streams import GPU, FakeStreams, Stream
from test_executor import Bench, Raises
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.dist import collectives
from hocket.errors import RankLost, UBatchFailed
from hocket.moe.base import TokenLayout
from hocket.moe.placement import ExpertPlacement
from hocket.moe.side import INLINE
from hocket.moe.transport import allgather_reducescatter, torch_a2a
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.schedule import HAND_OVER_FIRST, LAUNCH_FIRST, Launch
from hocket.overlap.sm_budget import Shares, SmBudget
from hocket.trace.spans import COMM, COMPUTE, Recorder, Span, Stage, Step
from hocket.ubatch.context import current
from hocket.ubatch.transfer import Transfer

S = Stage
CPU = torch.device("cpu")
QKV, ATTENTION, DISPATCH, EXPERTS, COMBINE, SHARED = S.QKV, S.ATTENTION, S.DISPATCH, S.EXPERTS, S.COMBINE, S.SHARED
TRANSPORTS = ("allgather_reducescatter", "torch", "apart")
"""Two as they are on a GPU, of which the second makes the host wait; and the first with send and receive apart."""


class Launches(list[Span]):
    """A recorder's spans, each of compute launched on the stream that is current when it begins."""

    def __init__(self, cuda: FakeStreams) -> None:
        super().__init__()
        self.cuda = cuda

    def append(self, span: Span) -> None:
        launch = Launch(span.stage, span.ubatch, span.layer)
        if span.lane != COMM and launch not in self.cuda.ran:  # a dense layer has the same again
            self.cuda.run(launch)


class NothingNew(TorchDispatchMode):
    """Operations inside may not make tensors of their own: their memory would be the comm stream's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        new = [x for x in tree_leaves(out) if isinstance(x, Tensor) and memory(x) not in given]
        assert not new, f"{func} allocates on the comm stream"
        return out


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Watching(Recorder):
    """Every step's spans of compute are launches."""

    def __init__(self, cuda: FakeStreams) -> None:
        super().__init__()
        self._cuda = cuda

    def begin(self, phase: str, num_ubatches: int, num_tokens: int) -> Step:
        return Step(phase, num_ubatches, num_tokens, spans=Launches(self._cuda))


class Watched(Transport):
    """A transport whose transfers say when they run. `fail_at`: the transfer that fails as a broken collective does."""

    name = "watched"
    requires_padding = True

    def __init__(self, inner: Transport, cuda: FakeStreams, *, is_apart: bool) -> None:
        self.inner, self.cuda, self.apart = inner, cuda, is_apart
        self.launch_blocks = inner.launch_blocks  # type: ignore[misc]
        self.sent: list[Launch] = []
        self.under_way: Launch | None = None
        self.fail_at = -1

    def _watched(self, transfer: Transfer[Any], stage: Stage) -> Transfer[Any]:
        context = current()
        assert context is not None
        send, recv = (Launch(stage, context.idx, context.track.layer, part) for part in ("send", "recv"))

        def run() -> None:
            if len(self.sent) == self.fail_at:
                self.fail_at = -1
                raise RuntimeError("[gloo] Connection closed by peer")
            self.sent.append(send)
            self.cuda.run(send)
            self.under_way = recv if self.apart else send
            with NothingNew():
                transfer.send()

        receive = (lambda: self.cuda.run(recv)) if self.apart else None
        return Transfer(run, transfer.result, transfer.num_bytes, receive)

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        return self._watched(self.inner.prepare(x, topk_ids, topk_weights, layout), DISPATCH)

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        return self._watched(self.inner.finalize(expert_out, handle), COMBINE)


class Case:
    """A model of one rank, whose transport runs as between ranks on a GPU."""

    def __init__(self, bench: Bench, name: str, kind: str, num_ubatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expected = bench.run(UBatchExecutor(bench.model, kind, 1, 10.0, CPU), 1)
        self.cuda = FakeStreams(monkeypatch)
        self.bench = bench
        self.compute = Stream()
        self.used: list[tuple[int, Launch]] = []  # memory that a collective used, and when it is free again
        self.cuda.watch = self._check_memory
        placement = ExpertPlacement(bench.config.moe.num_experts, 1)
        kinds = torch_a2a.TorchTransport, allgather_reducescatter.AllGatherReduceScatterTransport
        inner = kinds[name != "torch"](placement, 0, None, CPU)
        self.transport = Watched(inner, self.cuda, is_apart=name == "apart")
        for module in (torch_a2a, allgather_reducescatter):
            monkeypatch.setattr(module, "is_on_host", lambda x: False)
        monkeypatch.setattr(torch_a2a, "check_numbers", lambda *_: None)  # of a copy on the host
        for collective in ("all_to_all", "all_gather", "reduce_scatter_sum"):
            monkeypatch.setattr(collectives, collective, self._collective)
        for layer in bench.layers:
            monkeypatch.setattr(layer, "transport", self.transport)
        self.executor = UBatchExecutor(bench.model, kind, num_ubatches, 10.0, GPU)
        self.executor.recorder = Watching(self.cuda)
        self.cuda.may_time = True
        self.num_ubatches = num_ubatches

    def _collective(self, output: Tensor, input: Tensor, *_: Any) -> None:
        output.copy_(input)
        transfer = self.transport.under_way
        assert transfer is not None
        self.used += [(x.untyped_storage()._weak_ref(), transfer) for x in (output, input)]

    def _check_memory(self) -> None:
        """Nobody has given back memory of a transfer that the compute stream does not come after."""
        for used, transfer in self.used:
            if transfer not in self.compute.known:
                assert not torch.UntypedStorage._expired(used), f"memory of {transfer.text()} is given back too early"

    def run(self) -> Tensor:
        with self.cuda.stream(self.compute):
            return self.bench.run(self.executor, self.num_ubatches)

    def forget(self) -> None:
        """As if nothing had been launched yet."""
        for ran in self.cuda.ran.values():
            ran.stream.known.clear()
        self.cuda.ran.clear()
        self.used.clear()
        self.transport.sent.clear()

    def last_part(self, stage: Stage, ubatch: int, layer: int) -> Launch:
        return Launch(stage, ubatch, layer, "recv" if self.transport.apart else "send")

    def check_order(self) -> None:
        """Every transfer on one stream beside all compute, behind its inputs alone; what takes its result behind it."""
        ran, layers = self.cuda.ran, range(len(self.bench.layers))
        order = [launch for launch in ran if not launch.part]
        comm = {ran[launch].stream for launch in ran if launch.part}
        assert len(comm) == 1
        assert self.compute not in comm
        assert {ran[launch].stream for launch in order} == {self.compute}
        for ubatch in range(self.num_ubatches):
            for layer in layers:
                for stage, then in ((DISPATCH, (EXPERTS, layer)), (COMBINE, (QKV, layer + 1))):
                    send, ready = Launch(stage, ubatch, layer, "send"), Launch(stage, ubatch, layer)
                    computed = {launch for launch in ran[send].after if not launch.part}
                    assert computed == set(order[: order.index(ready) + 1]), "its inputs, and nothing launched later"
                    if then[1] < len(layers):
                        assert self.last_part(stage, ubatch, layer) in ran[Launch(then[0], ubatch, then[1])].after

    def check_end(self) -> None:
        """Compute comes after all transfers of all ubatches."""
        assert len(self.transport.sent) == 2 * self.num_ubatches * len(self.bench.layers)
        assert {launch for launch in self.cuda.ran if isinstance(launch, Launch) and launch.part} <= self.compute.known
        assert len(self.used) > 2 * len(self.transport.sent) or self.transport.inner.name != "torch"
        assert len(self.used) >= 2 * len(self.transport.sent)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make("v2", tmp_path_factory.mktemp("checkpoints")))


@pytest.fixture(params=[(name, kind, n) for name in TRANSPORTS for kind in EXECUTORS for n in (2, 3)], ids=str)
def case(request: pytest.FixtureRequest, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    name, kind, n = request.param
    made = Case(bench, name, kind, n, monkeypatch)
    yield made
    made.executor.close()


def test_transfers_wait_for_their_inputs_and_compute_for_transfers(case: Case) -> None:
    for _ in range(2):  # the second step on what the first one left
        torch.testing.assert_close(case.run(), case.expected, atol=1e-5, rtol=0)
        case.check_order()
        case.check_end()
        case.forget()


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_runs_beside_each_transfer(bench: Bench, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ubatches in the steady state; D and C of compute are packing."""
    case = Case(bench, name, kind, 2, monkeypatch)
    case.run()
    case.executor.close()
    blocks = name == "torch"
    assert set(case.executor.schedules.values()) == {HAND_OVER_FIRST if blocks else LAUNCH_FIRST}
    attention = {(QKV, 0), (ATTENTION, 0), (DISPATCH, 0)}  # stage and how many layers later
    experts, shared = {(EXPERTS, 0), (COMBINE, 0)}, {(SHARED, 0)}
    next_attention = {(stage, 1) for stage, _ in attention}
    expected = {  # of the own ubatch, of the other one
        (DISPATCH, 0): (set(), attention),
        (DISPATCH, 1): (set(), experts if blocks else experts | shared),
        (COMBINE, 0): (shared, experts | shared),
        (COMBINE, 1): (shared, (shared if blocks else set()) | next_attention),
    }
    for layer in range(1, len(bench.layers) - 1):
        for (stage, ubatch), (own, others) in expected.items():
            beside = {x for x in case.cuda.beside(case.last_part(stage, ubatch, layer)) if not x.part}
            found = [{(x.stage, x.layer - layer) for x in beside if x.ubatch == who} for who in (ubatch, 1 - ubatch)]
            assert found == [own, others], (stage, ubatch, layer)


def test_what_is_captured_forks_from_one_stream_and_joins_it(case: Case) -> None:
    """Else a graph would miss the transfers, or could not be ended."""
    with case.cuda.stream(case.compute):
        case.cuda.run("begin")
        found = case.bench.run_captured(case.executor, case.num_ubatches)
    torch.testing.assert_close(found, case.expected, atol=1e-5, rtol=0)
    case.check_end()
    transfers = [ran for launch, ran in case.cuda.ran.items() if launch != "begin"]
    assert len(transfers) >= len(case.transport.sent)
    assert all(ran.stream is not case.compute and "begin" in ran.after for ran in transfers)


def test_compute_runs_on_the_stream_that_the_budget_enters(case: Case) -> None:
    part = Stream()
    case.executor.budget = SmBudget(Shares(comm_sms=2, compute_sms=4), stream=lambda: case.cuda.stream(part))
    case.compute = part
    with case.cuda.stream(Stream()):
        found = case.bench.run(case.executor, case.num_ubatches)
    torch.testing.assert_close(found, case.expected, atol=1e-5, rtol=0)
    case.check_order()
    case.check_end()


@pytest.mark.parametrize("stage", ["attention", "experts"])
def test_a_ubatch_that_fails_keeps_the_order(case: Case, stage: str) -> None:
    """It takes part without tokens: the same events, and memory lives as long."""
    decoder = case.bench.model.layers[2]
    owner = decoder if stage == "attention" else decoder.mlp
    inner = getattr(owner, stage)
    setattr(owner, stage, Raises(inner, 1))
    try:
        with pytest.raises(UBatchFailed, match="ubatch 1, sparse layer 1"):
            case.run()
    finally:
        setattr(owner, stage, inner)
    case.check_end()


def test_a_broken_collective_ends_the_step(case: Case) -> None:
    case.transport.fail_at = 3
    with pytest.raises(RankLost, match=r"a rank is late or gone: .* failed: "):
        case.run()
    assert len(case.transport.sent) == 3, "nothing is sent after the lane broke"


def test_times_are_noted_on_the_streams_of_what_they_are_of(case: Case) -> None:
    """Stages on the compute stream, in the order of launching; transfers on the comm stream."""
    recorder = case.executor.recorder = Recorder()
    case.run()
    (step,) = recorder.finished
    ticks = {ns: round((ns - step.start_ns) / 1e6) + 1 for span in step.spans for ns in (span.start_ns, span.stop_ns)}
    sent = [span for span in step.spans if span.part in ("send", "recv")]
    flights = [span for span in step.spans if span.part == "flight"]
    parts = 2 if case.transport.apart else 1
    assert len(sent) == parts * len(flights) == parts * 2 * case.num_ubatches * len(case.bench.layers)
    for span in step.spans:
        assert step.start_ns < span.start_ns < span.stop_ns < step.stop_ns
        streams = {case.cuda.timed[ticks[ns]] for ns in (span.start_ns, span.stop_ns)}
        assert (streams == {case.compute}) is (span.lane == COMPUTE)
        assert len(streams) == 1
    for flight in flights:
        own = [s for s in sent if (s.ubatch, s.layer, s.stage) == (flight.ubatch, flight.layer, flight.stage)]
        assert (flight.start_ns, flight.stop_ns) == (own[0].start_ns, own[-1].stop_ns)
    compute = [span for span in step.spans if span.lane == COMPUTE]
    assert all(a.stop_ns < b.start_ns for a, b in pairwise(compute))


def test_without_a_recorder_no_event_keeps_its_time(case: Case) -> None:
    case.executor.recorder, case.cuda.may_time = None, False
    case.cuda.watch = lambda: None
    case.run()
    assert not case.cuda.timed


def test_split_steps_have_no_side_stream(bench: Bench) -> None:
    assert all(layer.side is INLINE for layer in bench.layers)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_rows_to_send_are_found_without_their_number(num_ranks: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    for top_k in (1, 2, 8):
        owner = torch.randint(-1, num_ranks, (num_tokens, top_k), generator=generator)  # -1: nobody's
        is_wanted = (owner == torch.arange(num_ranks)[:, None, None]).any(dim=-1)
        _, expected = is_wanted.nonzero(as_tuple=True)
        found = torch_a2a.wanted_first(is_wanted, top_k)
        assert len(found) == min(num_ranks, top_k) * num_tokens
        assert torch.equal(found[: len(expected)], expected)
        assert ((found >= 0) & (found < max(num_tokens, 1))).all()
