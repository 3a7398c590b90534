"""Many clients of a server at once, most of them rude, and what they were told. Knows nothing of a server's inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from served import events, parsed

LIMIT_S = 120.0
PROMPTS = ["In the beginning", "The lady was", "And it came to pass", "Emma", "It is a truth", "Of the sea", "He", "A"]
BAD_BODIES = (b"{", b'{"prompt": "\xff"}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "n": 1000000000}')
KINDS = {"reads": 8, "goes": 5, "goes_at_once": 2, "resets": 2, "half_body": 1, "half_header": 1, "is_wrong": 1}
"""What clients do, and how often: read to the end; go after some events, before the first one, or with a reset; send
half of a body or of a header and go; ask for what is refused."""


def request_bytes(body: bytes) -> bytes:
    """A POST after which the server closes the connection."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Crowd:
    """Clients of the server at `port`. ends: how many did what; wrong: what went otherwise than it must."""

    def __init__(self, port: int, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._port = port
        self._draw = random.Random(seed)

    async def run(self, num_clients: int, seconds: float) -> None:
        """So many at a time; a client that is done is followed by another until the time is over."""
        stop_at = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(self._one_after_another(stop_at))

    async def _one_after_another(self, stop_at: float) -> None:
        while True:
            (kind,) = self._draw.choices(list(KINDS), list(KINDS.values()))
            try:
                async with asyncio.timeout(LIMIT_S):
                    await self._client(kind)
                self.ends[kind] += 1
            except (OSError, TimeoutError, AssertionError, ValueError, LookupError) as error:
                self.wrong.append(f"{kind}: {error!r}"[:300])
            if time.monotonic() > stop_at:
                return

    async def ask(self, body: dict[str, Any]) -> bytes:
        """The body of a good request's answer."""
        async with asyncio.timeout(LIMIT_S), self._sent(request_bytes(json.dumps(body).encode())) as (reader, _):
            return await self._answer(reader, 200)

    async def _client(self, kind: str) -> None:
        draw = self._draw
        num_tokens = draw.randrange(1, 24)
        body = {"prompt": draw.choice(PROMPTS), "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        if kind == "reads":
            chunks = events(await self.ask(body))
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            return
        if kind == "is_wrong":
            async with self._sent(request_bytes(draw.choice(BAD_BODIES))) as (reader, _):
                assert parsed(await self._answer(reader, 400))["error"]["message"]
            return
        raw = request_bytes(json.dumps(body | {"max_tokens": 400}).encode())
        whole = {"half_body": len(raw) - 9, "half_header": 60}.get(kind, len(raw))
        async with self._sent(raw[:whole]) as (reader, writer):
            if kind in ("goes", "resets"):
                await self._head(reader, 200)
                for _ in range(2 * draw.randrange(1, 8)):
                    await reader.readline()
            if kind == "resets":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()

    @contextlib.asynccontextmanager
    async def _sent(self, raw: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(raw)
            await writer.drain()
            yield reader, writer
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader, status: int) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), head.partition(b"\r\n")[0]
        return head.lower()

    async def _answer(self, reader: asyncio.StreamReader, status: int) -> bytes:
        """The whole body of an answer, whether it came in chunks or not."""
        is_chunked = b"transfer-encoding: chunked" in await self._head(reader, status)
        rest = await reader.read()
        if not is_chunked:
            return rest
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            if int(size, 16) == 0:
                return body
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        raise ValueError("the answer ended early")
