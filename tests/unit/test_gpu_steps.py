"""Recorded steps of a GPU with the times of made-up kernels: figures are the kernels', names those of stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import GPU, FakeStreams
from hypothesis import given
from hypothesis import strategies as st
from test_stream_lane import Case, bench, case
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from trace_checks import check_events, figures_of

from hocket.bench.trace import Workload, _engine_options
from hocket.config.options import Options
from hocket.trace import perfetto
from hocket.trace.figures import step_figures
from hocket.trace.gpu_intervals import Kernel, gpu_figures, told_apart
from hocket.trace.gpu_steps import MARK, fill
from hocket.trace.recording import Recording, recording_of
from hocket.trace.spans import COMM, COMPUTE, EVENTS, HOST, KERNELS, Recorder, Span, Stage, Step
from hocket.ubatch.stamps import record_replay
from hocket.worker.kernel_profile import KernelProfile

__all__ = ["bench", "case"]
US = 1000
AWAY = 7_000_000_123
"""The profiler's clock, and what the events' clock is off by beside it."""
COMPUTE_STREAM, COMM_STREAM = 7, 9
SPIN = f"at::cuda::(anonymous namespace)::{MARK}(long)"


def profile_of(steps: list[Step], kernels: list[list[Kernel]], off_ns: int = 0) -> list[Kernel]:
    """What a profiler would give of steps and their kernels, which have the spans' clock."""
    found = []
    for step, inside in zip(steps, kernels, strict=True):
        found.append(Kernel(SPIN, COMPUTE_STREAM, step.start_ns - 50 * US, step.start_ns))
        found += inside
        found.append(Kernel(SPIN, COMPUTE_STREAM, step.stop_ns + 2 * US, step.stop_ns + 52 * US))
        found.append(Kernel("sampler", COMPUTE_STREAM, step.stop_ns + 60 * US, step.stop_ns + 70 * US))
    moved = [Kernel(k.name, k.stream, k.start_ns + AWAY, k.stop_ns + AWAY) for k in found]
    return [k if MARK in k.name else Kernel(k.name, k.stream, k.start_ns + off_ns, k.stop_ns + off_ns) for k in moved]


def named_kernels(step: Step) -> list[Kernel]:
    """Two kernels with a gap between them in each span of a step that events have timed; names say where they are."""
    found = []
    for number, span in enumerate(one for one in step.spans if one.part != "flight"):
        what = "ncclDevKernel" if span.lane == COMM else "gemm"
        stream, tenth = (COMM_STREAM if span.lane == COMM else COMPUTE_STREAM), (span.stop_ns - span.start_ns) // 10
        name = f"{what} {number} {span.ubatch} {span.layer} {span.stage} {span.part}"
        found.append(Kernel(name, stream, span.start_ns + tenth, span.start_ns + 4 * tenth))
        found.append(Kernel(name, stream, span.start_ns + 6 * tenth, span.stop_ns - tenth))
    return found


def ns_of(kernels: list[Kernel]) -> int:
    return sum(kernel.stop_ns - kernel.start_ns for kernel in kernels)


class Marks:
    """A profile that notes which step each mark is before (None: behind one)."""

    def __init__(self, cuda: FakeStreams) -> None:
        self.is_running = True
        self.cuda = cuda
        self.marks: list[tuple[Step | None, int]] = []

    def start(self) -> None:
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False

    def passed(self, *, is_over: bool) -> None:
        pass

    def mark(self, step: Step | None) -> None:
        self.marks.append((step, len(self.cuda.timed)))


def test_a_step_as_the_executor_runs_it(case: Case) -> None:
    """Marks lie right around the events of a step; each kernel is called as the stage that launched it."""
    marks = Marks(case.cuda)
    recorder = case.executor.recorder = Recorder(profile=marks)
    case.run()
    (step,) = recorder.finished
    before, behind = marks.marks
    assert [before, behind] == [(step, 1), (None, len(case.cuda.timed))], "behind the base, and behind all"
    assert step.source == EVENTS
    kernels = named_kernels(step)
    launched = {kernel.name.split(" ", 2)[2] for kernel in kernels}
    computed, sent = ns_of([k for k in kernels if k.name < "n"]), {s.part for s in step.spans} - {"", "flight"}
    assert fill([step], profile_of([step], [kernels]), len(case.bench.layers))
    assert step.source == KERNELS
    pieces = [span for span in step.spans if span.part != "flight"]
    assert {f"{s.ubatch} {s.layer} {s.stage} {s.part}" for s in pieces} == launched
    for span in pieces:
        assert span.kernel.split(" ", 2)[2] == f"{span.ubatch} {span.layer} {span.stage} {span.part}"
    assert step_figures([step]).compute_ns == computed, "gaps are not compute"
    for flight in (span for span in step.spans if span.part == "flight"):
        own = [s for s in pieces if (s.lane, s.ubatch, s.layer, s.stage) == (COMM, *_place(flight))]
        assert {span.part for span in own} == sent
        assert (flight.start_ns, flight.stop_ns) == (own[0].start_ns, own[-1].stop_ns)
    check_recording(recording_of({"title": "made"}, [[step]], moves=True))
    assert {(one.source, one.target) for one in step.hand_overs} == {
        (ubatch, (ubatch + 1) % case.num_ubatches) for ubatch in range(case.num_ubatches) if case.num_ubatches > 1
    }


def _place(span: Span) -> tuple[int, int, Stage]:
    return span.ubatch, span.layer, span.stage


def check_recording(recording: Recording) -> None:
    """Its file holds together, and its figures are those of a sweep over the file's slices."""
    content = perfetto.to_json(recording)
    check_events(content)
    for rank in range(len(recording.ranks)):
        for name, value in figures_of(content, rank).items():
            assert content["otherData"]["figures_us"][rank][name] == pytest.approx(value, rel=1e-6, abs=0.01), name
    assert "times are those of kernels, by torch's profiler: gaps between them are stalls" in recording.notes


def event_step(start_us: int) -> Step:
    """Unsplit, of events: compute, a transfer, compute, as they follow each other on one stream."""
    step = Step("prefill", 1, 64, start_us * US, (start_us + 400) * US, source=EVENTS)
    at = start_us + 1
    for layer in range(3):
        for lane, stage, part, us in (
            (COMPUTE, Stage.ATTENTION, "", 40),
            (COMM, Stage.DISPATCH, "send", 25),
            (COMPUTE, Stage.EXPERTS, "", 30),
            (COMM, Stage.COMBINE, "send", 25),
        ):
            step.spans.append(Span(lane, 0, layer, stage, part, at * US, (at + us) * US))
            at += us + 1
    return step


@given(st.integers(-1_500, 1_500))
def test_clocks_that_differ_by_a_microsecond_name_no_other_stage(off_ns: int) -> None:
    step = event_step(100)
    kernels = named_kernels(step)
    assert fill([step], profile_of([step], [kernels], off_ns), 3)
    pieces = [span for span in step.spans if span.part != "flight"]
    assert len(pieces) == len(kernels)
    for span in pieces:
        assert span.kernel.split(" ", 2)[2] == f"{span.ubatch} {span.layer} {span.stage} {span.part}"


def test_without_all_marks_the_events_stay() -> None:
    steps = [event_step(100), event_step(1100)]
    found = profile_of(steps, [named_kernels(step) for step in steps])
    before = copy.deepcopy(steps)
    for kernels in ([], found[1:], [*found, Kernel(SPIN, 1, AWAY, AWAY + 1)]):
        assert not fill(steps, kernels, 3)
        assert steps == before
    recording = recording_of({}, [steps], moves=True)
    assert recording.notes == [
        "times are those of CUDA events, from launch to launch: gaps between kernels count as compute"
    ]
    steps[0].stop_ns = 0  # it broke off
    assert fill(steps, found, 3)
    assert [step.source for step in steps] == [EVENTS, KERNELS]


def replayed(start_us: int, comm_each: int, extra: int = 0) -> tuple[Step, list[Kernel]]:
    """Two ubatches of three layers in a graph: transfers beside compute, with gaps; `comm_each` kernels a layer."""
    step = Step("decode", 2, 8, start_us * US, (start_us + 700) * US, source=EVENTS)
    kernels, at = [], start_us + 5
    for _ in range(3):
        for number in range(comm_each):
            kernels.append(Kernel("gemm<float>", COMPUTE_STREAM, at * US, (at + 20) * US))
            kernels.append(Kernel("wait_signal", COMM_STREAM, (at + 10 + number) * US, (at + 27) * US))
            at += 30
    for number in range(extra):
        kernels.append(Kernel("wait_signal", COMM_STREAM, (at + 10 * number) * US, (at + 10 * number + 5) * US))
    return step, kernels


@pytest.mark.parametrize(("comm_each", "extra", "layers"), [(4, 0, {0, 1, 2}), (4, 2, {0}), (0, 0, {0}), (0, 5, {0})])
def test_a_graphs_replay(comm_each: int, extra: int, layers: set[int]) -> None:
    """Its figures are its kernels'; layers are told where each has as many transfers, and compute lies among them."""
    step, kernels = replayed(100, comm_each, extra)
    expected = gpu_figures(kernels)
    assert fill([step], profile_of([step], [kernels]), 3)
    figures = step_figures([step])
    assert (figures.comm_ns, figures.compute_ns, figures.exposed_ns) == (
        expected.comm_ns,
        expected.compute_ns,
        expected.exposed_ns,
    )
    assert {span.layer for span in step.spans} == (layers if step.spans else set())
    if len(layers) > 1:
        for layer in layers:
            mine = [span for span in step.spans if span.layer == layer]
            assert len([span for span in mine if span.lane == COMPUTE]) == comm_each
            assert max(s.stop_ns for s in mine) - min(s.start_ns for s in mine) < 30 * US * comm_each
    assert {span.name for span in step.spans} <= {"gemm<float>", "wait_signal"}
    assert not step.hand_overs
    if step.spans:
        recording = recording_of({"title": "made"}, [[step]], moves=True)
        check_recording(recording)
        assert any("replays of CUDA graphs" in note for note in recording.notes)


starts = st.integers(0, 90)
streams = st.sampled_from([COMPUTE_STREAM, COMM_STREAM])
names = st.sampled_from(["ncclDevKernel", "gemm", "norm", "Memcpy DtoD"])


@given(
    st.lists(st.tuples(names, st.sampled_from([COMPUTE_STREAM, COMM_STREAM]), starts, st.integers(1, 9)), max_size=9)
)
def test_whatever_overlaps(given_: list[tuple[str, int, int, int]]) -> None:
    """Kernels that begin before others have ended: lanes stay disjoint, and no moment is lost or counted twice."""
    step = Step("decode", 1, 1, 0, 100 * US)
    kernels = [Kernel(name, stream, at * US, (at + us) * US) for name, stream, at, us in given_]
    expected = gpu_figures(kernels)
    assert fill([step], profile_of([step], [kernels]), 2)
    figures = step_figures([step])
    assert (figures.compute_ns, figures.exposed_ns) == (expected.compute_ns, expected.exposed_ns)
    for lane in (COMPUTE, COMM):
        spans = [span for span in step.spans if span.lane == lane and span.part != "flight"]
        assert all(one.stop_ns <= other.start_ns for one, other in pairwise(spans))
    assert len(told_apart(kernels)[0]) + len(told_apart(kernels)[1]) == len(kernels)


class Profiler:
    """In place of torch's: gives the marks that were launched while it ran, and a kernel behind each first one."""

    launched: list[str] = []  # noqa: RUF012 (cleared by the fixture)
    running = 0

    def __init__(self, activities: object) -> None:
        self.names: list[str] = []

    def start(self) -> None:
        if Profiler.running:
            raise RuntimeError("another profiler runs")
        Profiler.running += 1
        Profiler.launched.clear()

    def stop(self) -> None:
        Profiler.running -= 1
        self.names = list(Profiler.launched)

    def events(self) -> Iterator[Any]:
        for number, name in enumerate(self.names):
            times = SimpleNamespace(start=100.0 * number, end=100.0 * number + 50)
            yield SimpleNamespace(name=name, device_resource_id=7, time_range=times, device_type=DeviceType.CUDA)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    found = FakeStreams(monkeypatch)
    found.may_time = True
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: Profiler.launched.append(SPIN))
    Profiler.launched.clear()
    Profiler.running = 0
    return found


def replay(recorder: Recorder, phase: str = "decode") -> None:
    if phase != "decode":
        recorder.begin(phase, 1, 8)
        return
    with record_replay(recorder, GPU, 2, 8):
        Profiler.launched.append("gemm")


def test_replays_are_recorded_while_a_profile_runs(cuda: FakeStreams) -> None:
    """Two of them after the first one; the profile ends with them, and gives each its kernel."""
    recorder = Recorder("decode", 1, 2)
    profile = recorder.profile = KernelProfile.started(2, is_early=False)
    assert profile is not None
    for expected in (False, True, True, True, False):
        assert (profile.is_running, Profiler.running) == (expected, int(expected))
        if not expected and not recorder.steps:
            recorder.begin("decode", 1, 8)  # the one to skip ran stage by stage
        else:
            replay(recorder)
    steps = recorder.finished
    profile.fill(1)
    assert [(s.phase, s.num_ubatches, s.num_tokens, s.source) for s in steps] == [("decode", 2, 8, KERNELS)] * 2
    assert [[span.kernel for span in step.spans] for step in steps] == [["gemm"]] * 2


def test_a_profile_does_not_wait_for_ever(cuda: FakeStreams) -> None:
    """The profiler keeps every kernel: it stops where steps to record do not come."""
    recorder = Recorder("prefill", 0, 2)
    recorder.profile = KernelProfile.started(2, is_early=True)
    assert Profiler.running
    for _ in range(30):
        replay(recorder)
    assert not Profiler.running
    assert not recorder.steps


def test_where_the_profiler_does_not_run(cuda: FakeStreams, caplog: pytest.LogCaptureFixture) -> None:
    other = KernelProfile.started(2, is_early=True)
    assert KernelProfile.started(2, is_early=True) is None
    assert "kernels cannot be profiled: another profiler runs" in caplog.text
    assert other is not None
    other.stop()
    other.stop()
    assert Profiler.running == 0
    recorder = Recorder("decode", 0, 2)
    replay(recorder)
    assert not recorder.steps, "of a replay nothing would be known"
    assert HOST not in (EVENTS, KERNELS)


def test_decodes_are_traced_as_they_run() -> None:
    """In graphs, unless the user wants none; prefills replay none, and of copies in graphs nothing could be told."""
    decode, prefill = Workload(phase="decode", num_steps=2), Workload(phase="prefill", num_steps=2)
    for work, given_, expected in (
        (decode, {}, False),
        (decode, {"enforce_eager": True}, True),
        (decode, {"emulate_link_gb_per_s": 10.0}, True),
        (decode, {"all2all_backend": "nvlink_copy"}, True),
        (prefill, {}, True),
    ):
        assert _engine_options(Options.from_dict({"model": "tiny"} | given_), work).enforce_eager is expected
    step, kernels = replayed(100, 4)
    assert fill([step], profile_of([step], [kernels]), 3)
    for by_copies in (False, True):
        notes = recording_of({"by_copies": by_copies}, [[step]], moves=True).notes
        assert any("communication is more than is shown" in note for note in notes) is by_copies
