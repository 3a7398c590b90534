"""`hocket serve` as a process with two ranks: OpenAI's own client, signals, lost ranks, HTTPS."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import LIMIT_S, Command
from test_launcher import environment
from test_lifecycle import children_of

pytest.importorskip("openai")
pytest.importorskip("fastapi")
import openai
from served import JSON, events, parsed

WIDE = ("--data-parallel-size", "2", "--enable-expert-parallel")
LONG = {"prompt": "In the beginning", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
HELLO: Any = [{"role": "user", "content": "Who was Emma?"}]


class Serving(Command):
    """A running `hocket serve tiny` on a free port."""

    def __init__(self, *arguments: str, scheme: str = "http") -> None:
        command = [sys.executable, "-m", "hocket.cli.main", "serve", "tiny", "--port", "0", *WIDE, *arguments]
        began = time.monotonic()
        super().__init__(["env", "--default-signal=INT", *command], environment())
        self.port = int(re.findall(rf"{scheme}://127.0.0.1:(\d+) ", self.wait_for("serving at"))[0])
        self.startup_s = time.monotonic() - began
        self.ranks = children_of(self.process.pid)
        assert len(self.ranks) == 2

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def health(self) -> tuple[int, Any]:
        connection = self.connect()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        status, body = answer.status, parsed(answer.read())
        connection.close()
        return status, body

    def post(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A request that has begun to be answered."""
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        return connection, connection.getresponse()

    def text_of(self, body: dict[str, Any]) -> str:
        connection, answer = self.post(body)
        text = parsed(answer.read())["choices"][0]["text"]
        connection.close()
        return str(text)

    def streaming(self, **more: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, bytes]:
        """A long stream whose first event has come."""
        connection, answer = self.post(LONG | {"stream": True} | more)
        first = answer.readline() + answer.readline()
        assert first.startswith(b"data: {")
        return connection, answer, first

    def ended(self) -> int:
        """Its exit code; neither it nor a rank is left."""
        code = super().ended()
        assert not [pid for pid in self.ranks if Path(f"/proc/{pid}").exists()]
        assert not any("Traceback" in line for line in self.lines), self.lines
        return code


@contextmanager
def running(*arguments: str, scheme: str = "http") -> Iterator[Serving]:
    command = Serving(*arguments, scheme=scheme)
    try:
        yield command
    finally:
        command.kill()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with running("--enable-dbo", "--dbo-decode-token-threshold", "2", "--api-key", "secret") as command:
        yield command


@pytest.fixture
def client(served: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_the_start_says_how_long_each_phase_took(served: Serving) -> None:
    (line,) = [line for line in served.lines if "start-up" in line]
    total, parts = re.fullmatch(r"hocket: start-up (\d+\.\d) s: (.*) \(of ranks the slowest, [01]\)", line).groups()
    names, seconds = zip(*(part.rsplit(" ", 1) for part in parts.split(", ")), strict=True)
    assert " ".join(names) == "imports front waiting processes rendezvous weights KV cache graphs server"
    took = dict(zip(names, map(float, seconds), strict=True))
    assert float(total) == pytest.approx(sum(took.values()), abs=0.05 * (len(took) + 1))
    assert served.startup_s / 2 < float(total) < served.startup_s + 0.1
    assert took["processes"] > took["graphs"] == 0.0  # it imports torch; there are none on a CPU


# -- OpenAI's client --------------------------------------------------------------------------------------------------


def test_openai_completions_and_chat(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt="In the beginning", logprobs=2, **given)
    assert whole.usage.completion_tokens == 8
    assert len(whole.choices[0].logprobs.tokens) == 8
    chunks = list(client.completions.create(prompt="In the beginning", stream=True, **given))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    chat = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=0, **given)
    assert chat.choices[0].message.role == "assistant"
    assert [entry.top_logprobs for entry in chat.choices[0].logprobs.content] == [[]] * 8
    options = {"include_usage": True}
    stream = client.chat.completions.create(messages=HELLO, stream=True, stream_options=options, **given)
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content
    assert (last.choices, last.usage.total_tokens) == ([], chat.usage.total_tokens)


def test_openai_many_at_once(served: Serving) -> None:
    async def ask(client: Any, number: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=1 + number % 5, seed=number, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async def main() -> list[str]:
        url = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            async with asyncio.timeout(LIMIT_S):
                return await asyncio.gather(*(ask(client, number) for number in range(20)))

    assert all(asyncio.run(main()))


def test_openai_errors(client: Any, served: Serving) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Hello", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        client.completions.create(model="other", prompt="Hello")
    stranger = client.with_options(api_key="guessed")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_streams(served: Serving) -> None:
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-H", "Authorization: Bearer secret", "-d"]
    body = {"prompt": "Hello", "max_tokens": 60, "stream": True, "temperature": 0, "ignore_eos": True}
    said = json.dumps(body | {"return_token_ids": True})
    done = subprocess.run([*command, said], capture_output=True, timeout=LIMIT_S, check=True)
    tokens = [len(event["choices"][0]["token_ids"]) for event in events(done.stdout)]
    assert len(tokens) > 1
    assert sum(tokens) == 60  # on a busy machine an event may bring many


# -- signals and lost ranks -------------------------------------------------------------------------------------------


def test_sigterm_lets_requests_end() -> None:
    with running() as command:
        assert command.health() == (200, {"status": "ok"})
        idle = command.connect()
        idle.request("GET", "/health")
        idle.getresponse().read()
        connection, answer, first = command.streaming(max_tokens=60)
        command.process.send_signal(signal.SIGTERM)
        assert "finishing 1 requests" in command.wait_for("SIGTERM")
        chunks = events(first + answer.read())
        assert len(chunks) > 1
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert idle.sock is not None
        assert idle.sock.recv(1) == b""  # it was closed while the other one went on
        idle.close()
        assert command.ended() == 0
        with pytest.raises(ConnectionError):
            command.health()


@pytest.mark.parametrize("drain_timeout", ["0.5", "60"])
def test_a_drain_ends_at_its_limit_or_with_a_second_signal(drain_timeout: str) -> None:
    with running("--drain-timeout", drain_timeout, "--emulate-link-gb-per-s", "0.001") as command:
        connection, answer, _ = command.streaming()  # the link is so slow that it takes minutes
        command.process.send_signal(signal.SIGINT)
        command.wait_for("SIGINT")
        if drain_timeout == "60":
            command.process.send_signal(signal.SIGINT)
        raw = answer.read()
        assert b'"error"' in raw
        assert b"the server is shutting down" in raw or b"the server was stopped" in raw
        connection.close()
        assert command.ended() == (130 if drain_timeout == "60" else 0)


def test_r043_a_killed_rank_is_said_everywhere() -> None:
    with running() as command, ThreadPoolExecutor(1) as pool:
        connection, answer, _ = command.streaming()
        waiting = pool.submit(command.post, LONG)
        os.kill(command.ranks[1], signal.SIGKILL)
        assert b"rank 1 ended unexpectedly" in answer.read()
        status, body = command.health()
        assert status == 503
        assert "rank 1 ended unexpectedly (killed by signal 9" in body["reason"]
        other, whole = waiting.result(LIMIT_S)
        assert whole.status in (500, 503)
        assert "rank 1 ended unexpectedly" in parsed(whole.read())["error"]["message"]
        other.close()
        connection.close()
        assert command.ended() == 1
        assert command.lines[-1].startswith("hocket: RankLost: ")
        assert "rank 1" in command.lines[-1]


def test_all_ranks_are_started_anew_where_that_is_asked_for() -> None:
    with running("--on-rank-loss", "restart") as command:
        connection, answer, _ = command.streaming()
        text = LONG | {"max_tokens": 8}
        expected = command.text_of(text)
        os.kill(command.ranks[0], signal.SIGKILL)
        assert b"rank 0" in answer.read()
        connection.close()
        status, body = command.health()
        assert status == 503
        assert "being started anew" in body["reason"]
        command.wait_for("serving again")
        assert command.health()[0] == 200
        assert command.text_of(text) == expected
        command.ranks = children_of(command.process.pid)
        assert len(command.ranks) == 2
        command.process.send_signal(signal.SIGTERM)
        assert command.ended() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names, *files], check=True, capture_output=True, timeout=LIMIT_S)
    with running("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), scheme="https") as command:
        trusted = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", command.port, timeout=LIMIT_S, context=trusted)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        command.process.send_signal(signal.SIGTERM)
        assert command.ended() == 0


def test_a_second_server_on_the_port_is_refused_at_once(served: Serving) -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "hocket.cli.main", "serve", "tiny", "--port", str(served.port)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"port: {served.port}" in line
    assert time.monotonic() - started < LIMIT_S / 2
