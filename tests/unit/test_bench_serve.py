"""`hocket bench serve`: what it asks, when, and the figures it makes of the answers."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fake_server import serving

from hocket.bench.http_client import Server, Streamed
from hocket.bench.serve import Load, times
from hocket.bench.table import read_reports, table_of
from hocket.cli.main import main
from hocket.errors import ConfigError
from hocket.server.settings import Settings

LOAD: dict[str, Any] = {
    "num_prompts": 200,
    "input_len": 8,
    "output_len": 4,
    "request_rate": 10.0,
    "arrivals": "poisson",
    "max_concurrency": None,
    "prompts_file": None,
    "vocab_size": 100,
    "chat": False,
    "ignore_eos": True,
    "temperature": 0.0,
    "model": None,
}


def test_arrivals() -> None:
    starts = Load(**LOAD).starts(1)
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert starts[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.25)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.35)  # exponential: as large as the mean
    assert Load(**LOAD).starts(1) == starts != Load(**LOAD).starts(2)
    assert Load(**LOAD | {"arrivals": "fixed"}).starts(1)[:3] == [0.0, 0.1, 0.2]
    assert set(Load(**LOAD | {"request_rate": None}).starts(1)) == {0.0}


def test_requests_differ_from_run_to_run_and_repeat_with_the_seed() -> None:
    load = Load(**LOAD)
    assert load.bodies(1) == load.bodies(1) != load.bodies(2)
    assert all(len(body["prompt"]) == 8 and max(body["prompt"]) < 100 for body in load.bodies(1))


def test_figures() -> None:
    answers = [
        Streamed(sent=1.0, times=[1.5, 1.7, 2.0], num_prompt_tokens=8, num_tokens=6),
        Streamed(sent=2.0, times=[2.25], num_prompt_tokens=8, num_tokens=1),
    ]
    found = {name: [round(value, 6) for value in values] for name, values in times(answers).items()}
    assert found == {"ttft_ms": [500, 250], "e2e_ms": [1000, 250], "itl_ms": [200, 300], "tpot_ms": [100]}


@pytest.mark.parametrize(("field", "value"), [("arrivals", "bursts"), ("chat", True)])
def test_wrong_loads(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Load(**LOAD | {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("url", ["x", "localhost:8000", "ftp://host", "http://"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Server(url, None, 1.0)


def test_two_servers_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("Hello\nWho was Emma?\n")
    with serving(Settings(port=0, api_keys=("secret",))) as first, serving() as second:
        first.text = second.text = "some words that follow each other for a while, and then some more"
        urls = [f"http://127.0.0.1:{served.port}" for served in (first, second)]
        arguments = ["--num-prompts", "6", "--output-len", "5", "--repeats", "2", "--request-rate", "50"]
        arguments += ["--max-concurrency", "2", "--prompts-file", str(prompts), "--chat", "--api-key", "secret"]
        arguments += [part for url in urls for part in ("--url", url)] + ["--output", str(tmp_path / "ab.json")]
        monkeypatch.setattr("sys.argv", ["hocket", "bench", "serve", *arguments])
        assert main() == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        for served in (first, second):
            served.until(served.is_idle)
            assert served.model.client.num_finished == 13  # one to try
    assert [row["url"] for row in report["rows"]] == urls
    for row in report["rows"]:
        assert (row["num_answers"], row["num_failed"]) == (12, 0)
        assert row["output_tokens_per_s"] == pytest.approx(5 * row["requests_per_s"])
        assert row["ttft_ms"]["median"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["max"]
        assert statistics.median(row["runs"]["requests_per_s"]) == row["requests_per_s"]
        assert min(row["runs"]["ttft_ms"]) <= row["ttft_ms"]["median"] <= max(row["runs"]["ttft_ms"])
    table = table_of(read_reports([str(tmp_path / "ab.json")])).splitlines()
    assert table[0] == f"load 6 chats of {prompts.name} + 5 tokens, 50/s poisson, at most 2 at once, runs 2"
    assert [url in line for url, line in zip(urls, table[-2:], strict=True)] == [True, True]


def test_answers_shorter_than_asked_for_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server cuts max_tokens to what fits, so figures would be of another load than they say."""
    with serving() as served:
        served.text = "some words"
        arguments = ["--url", f"http://127.0.0.1:{served.port}/v1/", "--num-prompts", "2", "--repeats", "1"]
        monkeypatch.setattr("sys.argv", ["hocket", "bench", "serve", *arguments, "--output-len", "5000"])
        assert main() == 0
        out = capsys.readouterr().out
        row = json.loads(out.splitlines()[-1])["rows"][0]
        assert row["num_short"] == row["num_answers"] == 2
        assert 0 < row["tokens_per_answer"] < 5000
        assert "2 of 2 answers are shorter than --output-len 5000" in " ".join(out.split())
        served.until(served.is_idle)


def test_failures_are_counted_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Settings(port=0, max_concurrent_requests=1)) as served:
        served.text = "some words"
        arguments = ["--url", f"http://127.0.0.1:{served.port}", "--num-prompts", "8", "--repeats", "1"]
        monkeypatch.setattr("sys.argv", ["hocket", "bench", "serve", *arguments, "--output-len", "200"])
        assert main() == 1
        out = capsys.readouterr().out
        row = json.loads(out.splitlines()[-1])["rows"][0]
        assert row["num_failed"] > 0
        assert row["num_answers"] + row["num_failed"] == 8
        assert "status 429" in row["errors"][0]
        assert "FAILED" in out
        served.until(served.is_idle)
    monkeypatch.setattr("sys.argv", ["hocket", "bench", "serve", "--url", f"http://127.0.0.1:{served.port}"])
    assert main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
