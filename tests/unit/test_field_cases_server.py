"""Situations that have broken systems of this kind: what each command refuses, and OpenAI's own client."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
import openai
from fake_server import FakeServed, serving

from hocket.cli.main import main

WIDE = ("--data-parallel-size", "2", "--enable-expert-parallel")
COMMANDS = (
    ("generate", "-p", "x"),
    ("serve",),
    ("verify",),
    ("trace",),
    ("bench", "step"),
    ("bench", "throughput"),
    ("bench", "overlap"),
)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands set up this process's."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--all2all-backend", "pplx"), ("all2all-backend", "'pplx'", "auto, torch, allgather_reducescatter")),
        (("--all2all-backend", "deepep_low_latency"), ("deepep_low_latency", "here: torch, allgather-reducescatter")),
        (("--moe-backend", "triton"), ("moe-backend", "'triton'", "auto, reference, grouped-mm")),
        (("--expert-parallel-size", "1"), ("--expert-parallel-size", "--data-parallel-size")),
        (("--kv-transfer-config", '{"kv_role": "kv_producer"}'), ("kv-transfer-config",)),
        (("--disaggregation-mode", "prefill"), ("disaggregation-mode",)),
    ],
)
def test_r106_r108_r109_overlap_with_what_is_not_there_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    arguments: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    """Whatever is run: exit code 2, what was given, and what is accepted. Nothing is started by then."""
    monkeypatch.setattr("hocket.dist.launcher.RankGroup.start", None)
    port = ("--port", "0") if command == ("serve",) else ()
    monkeypatch.setattr("sys.argv", ["hocket", *command, *port, *WIDE, "--enable-dbo", *arguments])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hocket: ")
    for text in expected:
        assert text in line.replace("_", "-") or text in line, line


@pytest.fixture(scope="module")
def served() -> Iterator[FakeServed]:
    with serving() as served:
        served.text = "some words that follow"
        yield served


@pytest.mark.parametrize("num_top", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_r123_r124_top_logprobs_of_the_official_client(served: FakeServed, num_top: int | None, stream: bool) -> None:
    """200 where log-probabilities are asked for without alternatives; those are an empty list then, never null."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "logprobs": True, "stream": stream}
    if num_top is not None:
        asked["top_logprobs"] = num_top
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(messages=[{"role": "user", "content": "Hi"}], **asked)
        assert raw.status_code == 200
        answer = raw.parse()
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert [len(entry.top_logprobs) for entry in entries] == [num_top or 0] * 3
