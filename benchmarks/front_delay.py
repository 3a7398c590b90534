"""Times what the front adds to a token, over ranks without a model. Run by hand: python benchmarks/front_delay.py

A step of all streams is made to come every 20 ms; clients in another process note when they have its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from fake_server import FakeServed, serving  # noqa: E402

NUM_TOKENS, STEP_S, REPEATS, WARM = 150, 0.02, 5, 5
TEXT = " word and then some other text was" * NUM_TOKENS


class Stream(asyncio.Protocol):
    """Asks for a stream and keeps what comes with its time, to be read when all is over."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._came: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = {"prompt": "Hello", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        raw = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n"
        transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)

    def data_received(self, data: bytes) -> None:
        self._came.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(self._came)


def token_times(came: list[tuple[float, bytes]]) -> list[float]:
    """When each token came (time.perf_counter); tokens that came together are as many."""
    times = []
    for now, data in came:
        for line in data.splitlines():
            if line.startswith(b"data: {"):
                times += [now] * len(json.loads(line[6:])["choices"][0]["token_ids"])
    return times


async def arrivals(port: int, num_streams: int) -> list[list[float]]:
    """By stream, the times of its tokens."""
    loop = asyncio.get_running_loop()
    streams = [(await loop.create_connection(Stream, "127.0.0.1", port))[1] for _ in range(num_streams)]
    return [token_times(await stream.done) for stream in streams]


def steps(served: FakeServed, num_streams: int) -> tuple[list[float], list[list[float]]]:
    """When each step's tokens were there for the front, and when the clients had them."""
    command = [sys.executable, __file__, str(served.port), str(num_streams)]
    clients = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    served.until(lambda: served.model.client.num_requests == num_streams)
    made: list[float] = []

    def step() -> None:
        served.group.step()
        made.append(time.perf_counter())
        served.model.client._pump()

    for _ in range(NUM_TOKENS):
        served.loop.call_soon_threadsafe(step)
        time.sleep(STEP_S)
    return made, json.loads(clients.communicate(timeout=60)[0])


def show(made: Sequence[float], came: Sequence[Sequence[float]]) -> None:
    delays = [(b - a) * 1e3 for times in came for a, b in list(zip(made, times, strict=True))[WARM:]]
    tenths = statistics.quantiles(delays, n=10)
    own = statistics.median(b - a for a, b in zip(made[WARM:], made[WARM + 1 :], strict=False)) * 1e3
    theirs = statistics.median(b - a for times in came for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False))
    print(
        f"{len(came):4} streams: a token {tenths[4]:.2f} [{tenths[0]:.2f} - {tenths[8]:.2f}] ms late; between tokens "
        f"{theirs * 1e3:.2f} ms for steps every {own:.2f}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(asyncio.run(arrivals(int(sys.argv[1]), int(sys.argv[2])))))
        return
    print("from a step's tokens at the front to a client; median [10th - 90th percentile]")
    with serving() as served:
        served.text = TEXT
        served.group.paused = True
        for num_streams in (1, 32, 128):
            for _ in range(REPEATS):
                show(*steps(served, num_streams))


if __name__ == "__main__":
    main()
