"""`hocket serve` under a crowd most of whom go: a good client is answered right, and afterwards nothing is left.

HOCKET_TEST_LOAD_S: seconds of load, 12 unless set; 300 for a long look.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
from crowd import PROMPTS, Crowd
from metrics_text import Shown
from processes import held, resident_bytes
from served import parsed
from test_serve_command import Command, running

LOAD_S = float(os.environ.get("HOCKET_TEST_LOAD_S", "12"))
NUM_CLIENTS = 200
SETTLE_S = 60.0
MAX_GROWTH = 24 * 2**20
"""Bytes that a process may have more after the load than when it had once seen as many clients: its heap is in pieces.
A request that stayed would be some kilobytes, hundreds of them in every second of load."""
IN_USE = ("hocket:num_requests_running", "hocket:num_requests_waiting", "hocket:kv_cache_usage_perc")
GOOD = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Command]:
    split = ("--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "4")
    with running("--enable-dbo", *split) as command:
        yield command


def in_use(served: Command) -> dict[str, float]:
    """Requests and blocks in use on the ranks, over all of them."""
    connection = served.connect()
    try:
        connection.request("GET", "/metrics")
        shown = Shown(connection.getresponse().read())
    finally:
        connection.close()
    return {name: sum(shown.by_engine(name).values()) for name in IN_USE}


def settled(served: Command) -> dict[int, tuple[int, int]]:
    """Wait until no request, block or connection is left; threads and descriptors of all processes then."""
    pids = [served.process.pid, *served.ranks]
    stop_at, before, now = time.monotonic() + SETTLE_S, {}, {pid: held(pid) for pid in pids}
    while any(in_use(served).values()) or now != before:
        assert time.monotonic() < stop_at, (in_use(served), before, now)
        time.sleep(0.2)
        before, now = now, {pid: held(pid) for pid in pids}
    return now


async def good_beside(crowd: Crowd, seconds: float) -> set[str]:
    """The different answers that a good request gets while the crowd runs."""
    running = asyncio.create_task(crowd.run(NUM_CLIENTS, seconds))
    texts = set()
    while not running.done():
        texts.add(str(parsed(await crowd.ask(GOOD))["choices"][0]["text"]))
    await running
    return texts


@pytest.mark.timeout(LOAD_S + 300)
def test_a_crowd_leaves_nothing(served: Command) -> None:
    text = served.text_of(GOOD)
    warm = Crowd(served.port, seed=0)
    asyncio.run(warm.run(NUM_CLIENTS, 0.0))
    assert not warm.wrong
    before = settled(served)
    resident = {pid: resident_bytes(pid) for pid in before}
    crowd = Crowd(served.port, seed=1)
    texts = asyncio.run(good_beside(crowd, LOAD_S))
    after = settled(served)
    growth = {pid: resident_bytes(pid) - resident[pid] for pid in after}
    print(f"{LOAD_S:g} s: {dict(crowd.ends)}; (threads, descriptors) {after}; bytes more {growth}")
    assert not crowd.wrong
    assert crowd.ends.total() >= NUM_CLIENTS
    assert min(crowd.ends[kind] for kind in ("reads", "goes", "resets", "is_wrong")) > 0
    assert texts == {text}
    assert after == before
    assert max(growth.values()) < MAX_GROWTH
    assert served.text_of(GOOD) == text
    assert not any("Traceback" in line or "WARNING" in line for line in served.lines), served.lines
