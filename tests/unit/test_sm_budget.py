"""Multiprocessors of split steps: who gets how many, and that what was found is back, whatever happened inside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make
from fake_streams import GPU, FakeStreams, Stream
from test_executor import Bench
from torch import nn

from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import BackendUnavailable, ConfigError, UBatchFailed
from hocket.moe.experts.deep_gemm import DeepGemmExperts
from hocket.moe.experts.grouped_mm import GroupedMMExperts
from hocket.moe.experts.reference import ReferenceExperts
from hocket.moe.experts.triton_grouped import TritonGroupedExperts
from hocket.overlap import green_stream as green
from hocket.overlap import sm_limits
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.sm_budget import UNLIMITED, Shares, SmBudget, comm_share, divide
from hocket.quant import fp8

CPU = torch.device("cpu")
WIDE = {"data_parallel_size": 2, "enable_expert_parallel": True}


class Knob:
    """Something that takes a number of multiprocessors, as a library's global does."""

    def __init__(self, value: int | None = None) -> None:
        self.value = value
        self.fails = False

    def limit(self, num_sms: int) -> Callable[[], None]:
        if self.fails:
            raise ValueError("no such number")
        found, self.value = self.value, num_sms

        def undo() -> None:
            self.value = found

        return undo


@pytest.mark.parametrize(
    ("asked", "max_sms", "max_nccl_ctas", "comm"),
    [
        (20, None, None, 20),
        (20, None, 6, 6),
        (20, None, 32, 20),
        (20, 24, 6, 20),
        (20, 6, None, 6),
        (20, 0, 6, 0),
        (0, None, 6, 0),
    ],
)
def test_transfers_get_no_more_than_they_can_use(
    asked: int, max_sms: int | None, max_nccl_ctas: int | None, comm: int
) -> None:
    assert comm_share(asked, max_sms, max_nccl_ctas) == comm


@pytest.mark.parametrize(
    ("comm", "step", "compute"), [(20, 1, 112), (6, 1, 126), (6, 8, 120), (124, 8, 8), (131, 1, 1)]
)
def test_shares(comm: int, step: int, compute: int) -> None:
    assert divide(comm, 132, step) == Shares(comm_sms=comm, compute_sms=compute)


def test_transfers_that_take_none_limit_nobody() -> None:
    assert divide(0, 132) is None


@pytest.mark.parametrize(("comm", "step", "most"), [(132, 1, 131), (500, 1, 131), (125, 8, 124)])
def test_compute_needs_some(comm: int, step: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"HOCKET_DBO_COMM_SMS: {comm} is not allowed; allowed: at most {most}: "):
        divide(comm, 132, step)
    assert divide(most, 132, step) is not None


# -- set and brought back ----------------------------------------------------------------------------------------------


class Knobs:
    """Two of each side, found at other values than all, and a stream."""

    def __init__(self) -> None:
        self.comm, self.compute = (Knob(), Knob(24)), (Knob(130), Knob())
        self.log: list[str] = []
        limits = (tuple(knob.limit for knob in side) for side in (self.comm, self.compute))
        self.budget = SmBudget(Shares(comm_sms=20, compute_sms=112), *limits, stream=self._stream)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        self.log.append(f"on {self.values}")
        try:
            yield
        finally:
            self.log.append(f"off {self.values}")

    @property
    def values(self) -> list[int | None]:
        return [knob.value for knob in (*self.comm, *self.compute)]


FOUND: list[int | None] = [None, 24, 130, None]
LIMITED = [20, 20, 112, 112]


def test_what_was_found_is_brought_back() -> None:
    knobs = Knobs()
    for _ in range(2):
        with knobs.budget.entered():
            assert knobs.values == LIMITED
        assert knobs.values == FOUND
    assert knobs.log == [f"on {LIMITED}", f"off {LIMITED}"] * 2


def test_a_failure_inside_brings_it_back() -> None:
    knobs = Knobs()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), knobs.budget.entered():
            raise error
        assert knobs.values == FOUND
    with knobs.budget.entered():
        assert knobs.values == LIMITED


@pytest.mark.parametrize("side", ["comm", "compute"])
def test_a_limit_that_fails_leaves_the_others_as_found(side: str) -> None:
    knobs = Knobs()
    last = getattr(knobs, side)[1]
    last.fails = True
    with pytest.raises(ValueError, match="no such number"), knobs.budget.entered():
        pytest.fail("entered")
    assert (knobs.values, knobs.log) == (FOUND, [])
    last.fails = False
    with knobs.budget.entered():
        assert knobs.values == LIMITED


def test_entered_inside_itself_it_does_nothing_more() -> None:
    knobs = Knobs()
    with knobs.budget.entered():
        with knobs.budget.entered():
            assert knobs.values == LIMITED
        assert knobs.values == LIMITED
    assert knobs.values == FOUND
    assert len(knobs.log) == 2


# -- around split steps ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make("v2", tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("kind", EXECUTORS)
def test_split_steps_alone_run_under_it(bench: Bench, kind: str) -> None:
    knobs = Knobs()
    executor = UBatchExecutor(bench.model, kind, 2, 10.0, CPU, budget=knobs.budget)
    seen: list[list[int | None]] = []
    most = 5

    def see(*_: Any) -> None:
        seen.append(knobs.values)
        if len(seen) > most:
            raise ValueError("too often")

    hook = bench.model.register_forward_pre_hook(see)
    try:
        for n in (2, 1, 2):
            bench.run(executor, n)
        with pytest.raises(UBatchFailed, match="too often"):
            bench.run(executor, 2)
    finally:
        hook.remove()
        executor.close()
    assert seen == [LIMITED, LIMITED, FOUND, *[LIMITED] * 4]
    assert knobs.values == FOUND


# -- the stream of compute ---------------------------------------------------------------------------------------------


class Waiting(Stream):
    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known


class Green(Waiting):
    """What torch's GreenContext gives, with the keywords that torch 2.11 and 2.13 both take."""

    made: list[tuple[int, int]]

    @classmethod
    def create(cls, *, num_sms: int, device_id: int) -> Green:
        cls.made.append((num_sms, device_id))
        return cls()

    def Stream(self) -> Green:
        return self


@pytest.fixture
def _green_contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Green.made = []
    monkeypatch.setattr("torch.cuda.green_contexts.GreenContext", Green)
    green.green_stream.cache_clear()
    yield
    green.green_stream.cache_clear()


@pytest.mark.usefixtures("_green_contexts")
@pytest.mark.parametrize("fails", [False, True])
def test_both_streams_wait_for_each_other(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeStreams(monkeypatch)
    made = green.green_stream(GPU, 112)
    assert green.green_stream(GPU, 112) is made
    with cuda.stream(Waiting()):
        caller = cuda.current_stream()
        cuda.run("before")
        try:
            with made.entered():
                assert cuda.current_stream() is not caller
                cuda.run("inside")
                if fails:
                    raise UBatchFailed("inside")
        except UBatchFailed:
            assert fails
        assert cuda.current_stream() is caller
        cuda.run("after")
    assert cuda.ran["inside"].after == {"before"}
    assert cuda.ran["after"].after == {"before", "inside"}
    assert Green.made == [(112, 0)]


@pytest.mark.usefixtures("_green_contexts")
def test_a_gpu_that_has_failed_does_not_hide_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeStreams(monkeypatch)

    def refuses(stream: Stream, other: Stream) -> None:
        raise RuntimeError("CUDA error")

    def fail() -> None:
        with cuda.stream(Waiting()), green.GreenStream(GPU, 8).entered():
            monkeypatch.setattr(Waiting, "wait_stream", refuses)
            raise UBatchFailed("the cause")

    with pytest.raises(UBatchFailed, match="the cause"):
        fail()


def test_torch_without_green_contexts_says_what_to_do() -> None:
    with pytest.raises(BackendUnavailable, match=r"green context 'of 112 .* \(unset HOCKET_DBO_GREEN_CONTEXT to limit"):
        green.GreenStream(GPU, 112)


# -- what is limited ---------------------------------------------------------------------------------------------------


class Library(Knob):
    """DeepGEMM as far as it is asked here; like it, all multiprocessors at first."""

    def __init__(self) -> None:
        super().__init__(132)
        self.ran_with: list[int | None] = []

    def get_num_sms(self) -> int | None:
        return self.value

    def set_num_sms(self, num_sms: int) -> None:
        assert 0 < num_sms <= 132
        self.value = num_sms

    def fp8_gemm_nt(self, *_: Any) -> None:
        self.ran_with.append(self.value)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "deep_gemm", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return found


@pytest.fixture
def carve_out(monkeypatch: pytest.MonkeyPatch) -> Knob:
    """torch's own, which would tell of itself on standard error."""
    found = Knob()
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: found.value)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", lambda value: setattr(found, "value", value))
    return found


def config_of(**changes: Any) -> EngineConfig:
    """On two GPUs, with overlap."""
    return resolve(Options.from_dict({**WIDE, "device": "cuda", "enable_dbo": True, **changes}), gpus=2)


def transport(max_sms: int | None) -> Any:
    knob = Knob(24)
    return SimpleNamespace(max_sms=max_sms, limit_sms=knob.limit, knob=knob)


def test_every_kind_of_kernel_is_told(library: Library, carve_out: Knob) -> None:
    told = [TritonGroupedExperts(2, 128, 128) for _ in range(2)]
    told[1].num_sms = 50
    model = nn.ModuleList([*told, DeepGemmExperts(2, 128, 128), GroupedMMExperts(2, 16, 16)])
    moved = transport(24)
    budget = sm_limits.budget_of(model, moved, config_of(), GPU)
    with budget.entered():
        assert [experts.num_sms for experts in told] == [112, 112]
        assert (library.value, carve_out.value, moved.knob.value) == (112, 20, 20)
    assert [experts.num_sms for experts in told] == [None, 50]
    assert (library.value, carve_out.value, moved.knob.value) == (132, None, 24)


def test_what_a_model_does_not_have_is_left_alone(carve_out: Knob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    budget = sm_limits.budget_of(nn.ModuleList([ReferenceExperts(2, 16, 16)]), transport(None), config_of(), GPU)
    with budget.entered():
        assert budget.shares == Shares(comm_sms=20, compute_sms=112)
        assert carve_out.value is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("max_sms", "changes", "device", "shares"),
    [
        (None, {}, GPU, (20, 112)),
        (None, {"max_nccl_ctas": 4}, GPU, (4, 128)),
        (None, {"max_nccl_ctas": 64}, GPU, (20, 112)),
        (24, {"max_nccl_ctas": 4}, GPU, (20, 112)),
        (7, {}, GPU, (7, 124)),
        (0, {}, GPU, None),
        (None, {"enable_dbo": False}, GPU, None),
        (None, {"device": "cpu"}, CPU, None),
    ],
)
def test_shares_of_a_configuration(
    max_sms: int | None, changes: dict[str, Any], device: torch.device, shares: tuple[int, int] | None
) -> None:
    budget = sm_limits.budget_of(nn.ModuleList(), transport(max_sms), config_of(**changes), device)
    if shares is None:
        assert budget is UNLIMITED
    else:
        assert budget.shares == Shares(comm_sms=shares[0], compute_sms=shares[1])


@pytest.mark.usefixtures("_green_contexts", "library")
def test_a_green_context_gets_the_share_of_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeStreams(monkeypatch)
    monkeypatch.setenv("HOCKET_DBO_GREEN_CONTEXT", "1")
    monkeypatch.setenv("HOCKET_DBO_COMM_SMS", "10")
    budget = sm_limits.budget_of(nn.ModuleList(), transport(None), config_of(), GPU)
    assert Green.made == [(120, 0)]  # of 122, in groups of 8
    with cuda.stream(Waiting()), budget.entered():
        assert isinstance(cuda.current_stream(), Green)
        assert budget.shares == Shares(comm_sms=10, compute_sms=120)


def test_products_leave_the_limit_as_it_is(library: Library) -> None:
    x, scales = torch.zeros(3, 128), torch.ones(3, 1)
    fp8.product((x, scales), torch.zeros(8, 128), torch.ones(1, 1))
    undo = fp8.limit_sms(112)
    fp8.product((x, scales), torch.zeros(8, 128), torch.ones(1, 1))
    undo()
    assert (library.ran_with, library.value) == ([132, 112], 132)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    default = config_of()
    assert (default.overlap.comm_sms, default.overlap.use_green_context) == (20, False)
    for name, wrong in (("COMM_SMS", "many"), ("COMM_SMS", "-1"), ("GREEN_CONTEXT", "yes")):
        with monkeypatch.context() as patch:
            patch.setenv(f"HOCKET_DBO_{name}", wrong)
            with pytest.raises(ConfigError, match=f"HOCKET_DBO_{name}"):
                config_of()
    monkeypatch.setenv("HOCKET_DBO_COMM_SMS", "6")
    other = config_of()
    assert other.overlap.comm_sms == 6
    assert other.digest != default.digest


@pytest.mark.parametrize(
    ("comm_sms", "changes", "ctas"),
    [
        ("20", {}, 20),
        ("20", {"all2all_backend": "torch"}, 20),
        ("100", {}, 64),
        ("20", {"max_nccl_ctas": 3}, 3),
        ("0", {}, None),
        ("20", {"enable_dbo": False}, None),
        ("20", {"device": "cpu"}, None),
        ("20", {"emulate_link_gb_per_s": 46.0}, 20),
    ],
)
def test_nccl_gets_what_split_steps_leave_it(
    comm_sms: str, changes: dict[str, Any], ctas: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOCKET_DBO_COMM_SMS", comm_sms)
    assert config_of(**changes).parallel.max_nccl_ctas == ctas
