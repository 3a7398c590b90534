"""Situations that have broken systems of this kind, at servers as processes. Each test is named by its row."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
from odd_starts import LATE_S, ODD_RANK
from patched_ranks import environment_of
from served import JSON, parsed
from test_launcher import environment, free_port
from test_lifecycle import children_of

LIMIT_S = 90.0
WIDE = ("--data-parallel-size", "2", "--enable-expert-parallel")


@contextmanager
def starting(port: int, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`hocket serve tiny` on two ranks."""
    command = [sys.executable, "-m", "hocket.cli.main", "serve", "tiny", "--port", str(port), *WIDE]
    process = subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()
        process.wait()


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
    """Status and answer; 0 where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body, JSON if body else {})
        answer = connection.getresponse()
        return answer.status, parsed(answer.read())
    except ConnectionRefusedError:
        return 0, None
    finally:
        connection.close()


def until(port: int, expected: tuple[int, Any]) -> list[Any]:
    """What /health said until it said that."""
    said: list[Any] = []
    deadline = time.monotonic() + LIMIT_S
    while (found := ask(port, "GET", "/health")) != expected:
        assert time.monotonic() < deadline, found
        said += [found] if found not in said else []
        time.sleep(0.05)
    return said


def test_r114_a_rank_that_never_comes_is_named_by_health() -> None:
    """Not ready, with the reason; requests get it too. SIGTERM ends the server and the ranks that have come."""
    port = free_port()
    never = environment_of("odd_starts:late", **{ODD_RANK: "1", LATE_S: "1000"})
    with starting(port, **never) as process:
        reason = "starting: waiting for rank 1 to start"
        said = until(port, (503, {"status": "unavailable", "reason": reason}))
        assert {status for status, _ in said} <= {0, 503}
        status, answer = ask(port, "POST", "/v1/completions", '{"prompt": "In the"}')
        assert (status, answer["error"]["message"]) == (503, reason)
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 130
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_r114_a_rank_that_comes_late_is_waited_for() -> None:
    port = free_port()
    late = environment_of("odd_starts:late", **{ODD_RANK: "1", LATE_S: "8"})
    with starting(port, **late):
        said = until(port, (200, {"status": "ok"}))
        assert said, "it is not ready at once"
        assert {status for status, _ in said} <= {0, 503}
        assert (503, {"status": "unavailable", "reason": "starting: waiting for rank 1 to start"}) in said
        assert ask(port, "POST", "/v1/completions", '{"prompt": "In the", "max_tokens": 3}')[0] == 200
