"""A streaming request over HTTP and when each of its events came. Knows nothing of what is measured with it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11
import msgspec

from hocket.errors import ConfigError, HocketError

_READ_BYTES = 2**16


@dataclass
class Streamed:
    """One answer. Times are seconds of time.perf_counter: when it was sent, and each event that brought text."""

    sent: float
    times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str = ""


class Server:
    """Where to ask: `http://host:port` or `https://…`, with a path before the API's if there is one; the `/v1` that
    clients are told may stay.

    limit_s: seconds that an answer may take. Raises ConfigError for another kind of address.
    """

    def __init__(self, url: str, api_key: str | None, limit_s: float) -> None:
        parts: SplitResult = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", url, "such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._limit_s = limit_s
        self._headers = [("host", parts.netloc), ("connection", "close")]
        if api_key:
            self._headers.append(("authorization", f"Bearer {api_key}"))

    async def get(self, path: str) -> Any:
        """JSON of a path. Raises HocketError where the server does not answer so."""
        try:
            async with asyncio.timeout(self._limit_s):
                raw = b"".join([piece async for piece in self._pieces("GET", path, b"")])
            return msgspec.json.decode(raw)
        except (OSError, TimeoutError, h11.RemoteProtocolError, msgspec.DecodeError) as error:
            raise HocketError(f"{self.url}{path} does not answer: {error or type(error).__name__}") from None

    async def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """Ask, and note when events come. Whatever goes wrong is the answer's `error`."""
        streamed = Streamed(time.perf_counter())
        rest = b""
        try:
            async with asyncio.timeout(self._limit_s):
                async for piece in self._pieces("POST", path, msgspec.json.encode(body)):
                    *events, rest = (rest + piece).split(b"\n\n")
                    for event in events:
                        _note(streamed, event.removeprefix(b"data: "))
        except TimeoutError:
            streamed.error = f"no end after {self._limit_s:g} s"
        except (OSError, HocketError, h11.RemoteProtocolError, msgspec.DecodeError) as error:
            streamed.error = str(error) or type(error).__name__
        if not streamed.error and not streamed.times:
            streamed.error = "an answer without text"
        return streamed

    async def _pieces(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The answer's body as it comes. Raises HocketError for a status other than 200."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            talk = h11.Connection(h11.CLIENT)
            headers = [*self._headers, ("content-type", "application/json"), ("content-length", str(len(body)))]
            request = h11.Request(method=method, target=self._prefix + path, headers=headers)
            writer.write(b"".join(filter(None, map(talk.send, (request, h11.Data(body), h11.EndOfMessage())))))
            status, refusal = 0, b""
            while not isinstance(event := talk.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    talk.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refusal += event.data
            if status != 200:
                raise HocketError(f"status {status}: {refusal.decode(errors='replace')[:300]}")
        finally:
            writer.close()


def _note(streamed: Streamed, event: bytes) -> None:
    if event == b"[DONE]":
        return
    message = msgspec.json.decode(event)
    if "error" in message:
        raise HocketError(str(message["error"].get("message", message["error"])))
    if usage := message.get("usage"):
        streamed.num_prompt_tokens, streamed.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in message.get("choices", ())):
        streamed.times.append(time.perf_counter())
