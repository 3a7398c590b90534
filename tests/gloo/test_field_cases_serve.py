"""Situations that have broken systems of this kind, at servers as processes. Each test is named by its row."""

from __future__ import annotations

import http.client
import re
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


# -- start-up ---------------------------------------------------------------------------------------------------------


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
        reasons = [answer["reason"] for status, answer in said if status == 503]
        assert any(reason.startswith("starting: waiting for rank ") for reason in reasons), reasons
        assert ask(port, "POST", "/v1/completions", '{"prompt": "In the", "max_tokens": 3}')[0] == 200


# -- what is said of steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
def test_r112_each_line_of_the_log_is_of_its_own_batch(scheduling: str) -> None:
    """Two prompts in chunks of 16 tokens, one on each rank: lines have their chunks, then single tokens, in order, also
    where a step is scheduled before the one before has ended."""
    sizes, num_tokens = (37, 50), 5
    prompts = [part for size in sizes for part in ("--prompt-token-ids", ",".join(str(5 + i) for i in range(size)))]
    limits = ("--max-num-batched-tokens", "16", "--max-num-seqs", "4", "--max-tokens", str(num_tokens), "--ignore-eos")
    overlap = ("--enable-dbo", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "4")
    command = [sys.executable, "-m", "hocket.cli.main", "generate", "--model", "tiny", *WIDE, *overlap]
    done = subprocess.run(
        [*command, scheduling, *limits, *prompts],
        env=environment(HOCKET_LOG_LEVEL="DEBUG"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    form = r"hocket rank (\d): DEBUG: step \d+: (?:prefill|decode), \w+, tokens ([\d: ]+) of padded"
    computed: dict[str, list[int]] = {"0": [], "1": []}
    for rank, parts in re.findall(form, done.stderr):
        bounds = [int(end) for part in parts.split() for end in part.split(":")]
        computed[rank].append(max(bounds) - min(bounds))
    for rank, size in zip(computed, sizes, strict=True):
        chunks = [16] * (size // 16) + [size % 16]
        found = computed[rank]
        assert found[: len(chunks)] == chunks
        decodes = found[len(chunks) :]
        assert len(decodes) - (num_tokens - 1) in ((0, 1) if scheduling == "--async-scheduling" else (0,))
        assert set(decodes) == {1}
