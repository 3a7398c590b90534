"""One HTTP connection with limits on how long a client may take. Knows nothing of what is asked over it.

uvicorn limits how long a connection may be idle between requests, but neither how long a client takes for its request's
headers nor how long it may leave an answer unread.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from hocket.server.settings import Settings


class TimedProtocol(H11Protocol):
    """uvicorn's protocol. A client gets `header_timeout_s` from the connection, or from the first byte of a further
    request, to the end of the headers, and `send_timeout_s` to read on where it has left the socket full."""

    def __init__(self, *, limits: Settings, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._headers: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._headers = self.loop.call_later(self._limits.header_timeout_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_headers()
        elif self._headers is None:
            self._headers = self.loop.call_later(self._limits.header_timeout_s, self.transport.abort)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # the next request had come already
            self._stop_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_headers()
        self._stop_reading()

    def _stop_headers(self) -> None:
        if self._headers is not None:
            self._headers.cancel()
            self._headers = None

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
