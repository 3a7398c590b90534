"""`hocket serve` once for every rank or host, each with its own port: external and hybrid balancing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import LIMIT_S, Command
from in_process import in_process_llm
from test_launcher import ROOT, free_port
from test_lifecycle import children_of

from hocket.request import SamplingParams

pytest.importorskip("fastapi")
ENGINE = ("--enable-expert-parallel", "--enable-dbo", "--startup-timeout", "60")
SPLIT = ("--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2")
NUM_TOKENS = 120
PROMPTS = ["In the beginning", "The lady was", "One day", "He said"]


class Servers:
    """Commands that are one group. `port(n)`: of the n-th's server, once it serves."""

    def __init__(self, num_ranks: int, *more: str) -> None:
        self._common = ("serve", "tiny", "--port", "0", "--data-parallel-size", str(num_ranks), *ENGINE, *SPLIT)
        self._common += ("--data-parallel-rpc-port", str(free_port()), *more)
        self.commands: list[Command] = []
        self._ports: dict[int, int] = {}

    def start(self, *which: str) -> Command:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.commands.append(Command([sys.executable, "-m", "hocket", *self._common, *which], env))
        return self.commands[-1]

    def port(self, number: int) -> int:
        if number not in self._ports:
            line = self.commands[number].wait_for("serving at")
            self._ports[number] = int(re.findall(r"http://[\d.]+:(\d+) ", line)[0])
        return self._ports[number]

    def ask(self, number: int, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port(number)}{path}"
        return httpx.request(method, url, json=body, headers=headers, timeout=LIMIT_S)

    def complete(self, number: int, max_tokens: int = 8, **headers: str) -> list[str]:
        """Greedy answers to PROMPTS."""
        body = {"prompt": PROMPTS, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.ask(number, "POST", "/v1/completions", body, **headers)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    def metric(self, number: int, name: str, **labels: str) -> dict[str, float]:
        """A metric's sum by rank."""
        found: dict[str, float] = {}
        pattern = rf'^hocket:{name}{{engine="(\w+)",(.*)}} (\S+)'
        for rank, rest, value in re.findall(pattern, self.ask(number, "GET", "/metrics").text, re.M):
            if all(f'{label}="{wanted}"' in rest for label, wanted in labels.items()):
                found[rank] = found.get(rank, 0.0) + float(value)
        return found

    def health(self, number: int) -> tuple[int, str]:
        answer = self.ask(number, "GET", "/health")
        return answer.status_code, answer.text


@pytest.fixture(scope="module")
def right() -> list[str]:
    """What one rank alone answers to PROMPTS."""
    with in_process_llm("tiny", skip_tokenizer_init=False) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    made = Servers(*getattr(request, "param", (2,)))
    yield made
    for command in made.commands:
        command.kill()


def together(servers: Servers, *numbers: int) -> list[list[str]]:
    """What servers answer that are asked at the same time."""
    found: dict[int, list[str]] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: servers.complete(n)})) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [found[number] for number in numbers]


def test_a_server_for_every_rank(servers: Servers, right: list[str], tmp_path: Path) -> None:
    """Both split steps and answer right, together and alone; one that is told to end lets the other finish."""
    one = servers.start("--data-parallel-rank", "1", "--profile-dir", str(tmp_path))  # in any order
    first = servers.start("--data-parallel-rank", "0", "--data-parallel-external-lb")
    servers.commands.reverse()
    assert together(servers, 0, 1) == [right, right]
    servers.ask(1, "POST", "/start_profile")
    assert servers.complete(1) == right  # rank 0 has nothing to do, and steps
    assert '"firstRank":1' in Path(servers.ask(1, "POST", "/stop_profile").json()["page"]).read_text()
    for number in range(2):
        split = servers.metric(number, "overlap_steps_total", reason="split")
        assert list(split) == [str(number)]
        assert split[str(number)] > 0
        assert servers.metric(number, "request_success_total") == {str(number): 8.0 if number else 4.0}
    assert "a whole number from 1 to 1" in servers.ask(1, "POST", "/v1/completions", {"prompt": "x"}, **RANK_0).text
    ranks = children_of(first.process.pid) + children_of(one.process.pid)
    assert len(ranks) == 2
    stream = Stream(servers.port(0))
    one.process.send_signal(signal.SIGTERM)
    first.wait_for("ends: finishing 1 requests")
    assert stream.finished() == ("length", NUM_TOKENS)
    assert first.ended() == one.ended() == 0
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


RANK_0 = {"X-Data-Parallel-Rank": "0"}


class Stream:
    """A long completion that has begun."""

    def __init__(self, port: int) -> None:
        self._reason, self._num_tokens = "", 0
        self._has_begun = threading.Event()
        self.error = ""
        self._thread = threading.Thread(target=self._read, args=(f"http://127.0.0.1:{port}/v1/completions",))
        self._thread.start()
        assert self._has_begun.wait(LIMIT_S)

    def _read(self, url: str) -> None:
        body = {"prompt": "One day", "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=LIMIT_S) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self._has_begun.set()
                if "error" in event:
                    self.error = event["error"]["message"]
                    continue
                (choice,) = event["choices"]
                self._num_tokens += len(choice.get("token_ids") or ())
                self._reason = choice["finish_reason"] or self._reason

    def finished(self) -> tuple[str, int]:
        """Why it ended, and its tokens."""
        self._thread.join(LIMIT_S)
        return self._reason, self._num_tokens


def test_r043_a_rank_that_dies_is_named_by_all_servers(servers: Servers) -> None:
    for rank in range(2):
        servers.start("--data-parallel-rank", str(rank))
    ports = [servers.port(number) for number in range(2)]
    stream = Stream(ports[0])
    (rank,) = children_of(servers.commands[1].process.pid)
    os.kill(rank, signal.SIGKILL)
    for number in range(2):
        deadline = time.monotonic() + LIMIT_S
        while (found := servers.health(number))[0] == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert found[0] == 503
        assert "rank 1 ended unexpectedly (killed by signal 9" in found[1]
    assert [command.ended() for command in servers.commands] == [1, 1]
    stream.finished()
    assert "rank 1 ended unexpectedly" in stream.error
    for command in servers.commands:
        assert "RankLost: rank 1 ended unexpectedly" in command.lines[-1]
        assert not any("Traceback" in line for line in command.lines)


def test_a_server_that_is_stopped_at_once_ends_all(servers: Servers) -> None:
    for rank in range(2):
        servers.start("--data-parallel-rank", str(rank))
    first, one = servers.commands
    stream = Stream(servers.port(0))
    servers.port(1)
    one.process.send_signal(signal.SIGTERM)
    one.wait_for("SIGTERM: finishing 0 requests")
    one.wait_for("waiting for the servers with rank 0 to end")
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 130
    assert first.ended() == 1
    assert "RankLost: the server with rank 1" in first.lines[-1]
    assert "was stopped while others ran" in first.lines[-1]
    stream.finished()
    assert "was stopped while others ran" in stream.error


@pytest.mark.parametrize("servers", [(3, "--data-parallel-hybrid-lb", "--on-rank-loss", "restart")], indirect=True)
def test_a_server_for_every_host_and_a_new_start(servers: Servers, right: list[str]) -> None:
    """Each balances over its own ranks; all start anew when one of them is lost."""
    servers.start("--data-parallel-start-rank", "0", "--data-parallel-size-local", "2")
    servers.start("--data-parallel-start-rank", "2", "--data-parallel-size-local", "1")
    assert together(servers, 0, 1) == [right, right]
    assert servers.metric(0, "request_success_total") == {"0": 2.0, "1": 2.0}
    assert servers.metric(1, "request_success_total") == {"2": 4.0}
    assert [len(servers.ask(n, "GET", "/load").json()["ranks"]) for n in range(2)] == [2, 1]
    os.kill(children_of(servers.commands[0].process.pid)[1], signal.SIGKILL)
    for command in servers.commands:
        assert "RankLost: rank 1 ended unexpectedly" in command.wait_for("starting all ranks anew")
        command.wait_for("serving again")
    assert together(servers, 0, 1) == [right, right]
    servers.commands[0].process.send_signal(signal.SIGTERM)
    assert [command.ended() for command in servers.commands] == [0, 0]
