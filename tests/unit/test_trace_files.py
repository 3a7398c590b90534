"""A recording as Perfetto's JSON, as a page and as a picture: on made spans, whose times are known."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from trace_checks import check_events, figures_of

from hocket.errors import ConfigError
from hocket.trace import page, perfetto, picture
from hocket.trace.recording import Recording, middle_layer, typical_step, window_of
from hocket.trace.spans import COMM, COMPUTE, HandOver, Span, Stage, Step

US = 1000
LAYER_US = 100


def made_step(start_us: int, num_layers: int = 3) -> Step:
    """Two ubatches; in each layer 10 of 40 µs of communication are exposed."""
    spans, hand_overs = [], []
    for layer in range(num_layers):
        at = start_us + layer * LAYER_US
        for ubatch, shift in ((0, 0), (1, 30)):
            spans.append(Span(COMPUTE, ubatch, layer, Stage.ATTENTION, "", at + shift, at + shift + 28))
            spans.append(Span(COMM, ubatch, layer, Stage.DISPATCH, "send", at + shift + 28, at + shift + 33))
            spans.append(Span(COMM, ubatch, layer, Stage.DISPATCH, "recv", at + shift + 33, at + shift + 48))
            spans.append(Span(COMM, ubatch, layer, Stage.DISPATCH, "flight", at + shift + 28, at + shift + 48))
        hand_overs.append(HandOver(0, 1, at + 28, at + 30))
        spans.append(Span(COMPUTE, 0, layer, Stage.EXPERTS, "", at + 66, at + 90))
    for one in [*spans, *hand_overs]:
        one.start_ns, one.stop_ns = one.start_ns * US + 7, one.stop_ns * US + 7
    stop_us = start_us + num_layers * LAYER_US
    return Step("prefill", 2, 512, start_us * US, stop_us * US, spans, hand_overs)


@pytest.fixture
def recording() -> Recording:
    about = {"title": "made </script> spans, EMULATED", "command": "hocket trace"}
    return Recording(
        about, [[made_step(5_000_000), made_step(5_001_000)], [made_step(5_000_010), made_step(5_001_000)]]
    )


def test_events_are_what_perfetto_reads(recording: Recording) -> None:
    trace = json.loads(json.dumps(perfetto.to_json(recording)))
    check_events(trace)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"ub0 attn", "ub1 dispatch send", "ub1 dispatch recv", "ub0 experts", "hand-over ub0 → ub1"} <= names
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * 2 * 3, "one for each rank, step and layer"


def test_figures_in_the_file(recording: Recording) -> None:
    trace = perfetto.to_json(recording)
    for rank in (0, 1):
        found = trace["otherData"]["figures_us"][rank]
        for name, value in figures_of(trace, rank).items():
            assert found[name] == pytest.approx(value, rel=1e-6), name
        assert found["exposed"] == pytest.approx(3 * (2 + 8))
        assert found["hidden"] == pytest.approx(3 * (18 + 12))
        assert found["over_bound"] == pytest.approx(300 / (3 * (28 + 28 + 24)))


def test_a_file_read_is_what_was_written(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    perfetto.write(recording, path)
    again = perfetto.read(path)
    assert again.about == recording.about
    assert [len(steps) for steps in again.ranks] == [2, 2]
    assert again.figures() == recording.figures()
    base = recording.base_ns
    for steps, others in zip(recording.ranks, again.ranks, strict=True):
        for step, other in zip(steps, others, strict=True):
            moved = sorted((s.name, s.layer, s.start_ns - base, s.stop_ns - base) for s in step.spans)
            assert moved == sorted((s.name, s.layer, s.start_ns, s.stop_ns) for s in other.spans)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '{"traceEvents": [], "otherData": {"kind": "other", "version": 1}}',
        '{"traceEvents": [], "otherData": {"kind": "hocket trace", "version": 1, "figures_us": []}}',
    ],
)
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="compare"):
        perfetto.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        perfetto.read(tmp_path / "none.json")


def test_the_page_needs_nothing_but_itself(recording: Recording) -> None:
    text = page.page({"before": recording, "after": recording})
    assert not re.search(r"""(src|href)\s*=|@import|url\(["']?\w|fetch\(|XMLHttp|import\(""", text)
    assert text.count("</script>") == 2, "no title ends the script"
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    assert [panel["label"] for panel in data["panels"]] == ["before", "after"]
    panel = data["panels"][0]
    assert panel["title"] == recording.title
    figures = recording.figures()[0]
    assert panel["mean"][0]["exposed"] == pytest.approx(figures.per_step_us()["exposed"])
    rank = panel["steps"][0]["ranks"][0]
    assert sum(length for _, length in rank["exposed"]) == figures.exposed_ns / 2
    assert "prefers-color-scheme: dark" in text


def test_the_picture_shows_lanes_and_figures(recording: Recording) -> None:
    out = io.StringIO()
    picture.show(recording, picture.console(file=out))
    text = out.getvalue()
    lines = text.splitlines()
    assert len(lines) <= 24, "one screen"
    assert max(map(len, lines)) <= picture.MAX_WIDTH
    compute, comm, exposed = (
        next(line for line in lines if name in line) for name in ("compute │", "comm    │", "exposed │")
    )
    for name in ("attn₀", "attn₁", "experts₀"):
        assert name in compute
    assert "dispatch₀" in comm
    width = picture.MAX_WIDTH - 19
    start, stop = window_of([steps[0] for steps in recording.ranks], 1)
    marks = exposed.count("▲") / width * (stop - start) / US
    assert marks == pytest.approx(10, abs=2.5), "as long as what is exposed of a layer"
    assert "step / bound" in text
    assert recording.title in text


def test_a_trace_with_a_step_missing_on_a_rank_is_refused(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "uneven.json"
    recording.ranks[1].pop()
    perfetto.write(recording, path)
    with pytest.raises(ConfigError, match="as hocket trace writes it"):
        perfetto.read(path)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_in_a_narrow_terminal_every_figure_has_one_line(recording: Recording, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width)
    picture.show(recording, console)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    begin = next(idx for idx, line in enumerate(lines) if line.startswith("ms, mean of"))
    table = lines[begin + 1 : begin + 1 + len(picture.ROWS) + 1]
    assert [line[:5] for line in table][-1] == "step "
    assert all(re.match(r"\S+.* \d", line) for line in table), table
    figures = recording.figures()
    for (name, _), line in zip(picture.ROWS, table, strict=False):
        for one in figures:
            assert picture._value(name, one) in line, "figures are whole"


def test_which_step_and_layer_are_shown() -> None:
    steps = [made_step(0), made_step(1000, num_layers=5), made_step(2000, num_layers=4)]
    recording = Recording({}, [steps])
    assert typical_step(recording) == 2
    assert middle_layer(steps[1]) == 2
    assert window_of([steps[0]], 1) == (100 * US + 7, 190 * US + 7)


def test_ranks_of_one_server_among_several_have_their_own_numbers(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    perfetto.write(Recording(recording.about | {"first_rank": 2}, recording.ranks), path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 2", "rank 3"]
    assert perfetto.read(path).first_rank == 2
    assert '"firstRank":2' in page.page({"": perfetto.read(path)})
    out = io.StringIO()
    picture.show(perfetto.read(path), picture.console(file=out))
    assert out.getvalue().count("rank 2") == 2, "of its lanes and of its figures"
    assert '"firstRank":0' in page.page({"": recording})
