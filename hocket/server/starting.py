"""What is answered while the ranks start: status 503, and what is waited for. Knows no endpoint but the probes'.

It runs on a thread of its own, as loading keeps the main one, and ends before the server proper takes the socket:
who connects in between waits in the socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hocket.server.errors import Json, response, unavailable
from hocket.server.gate import OPEN_PATHS, Gate
from hocket.server.settings import Settings

_LAST_ANSWERS_S = 1
"""How long clients that are being answered keep the server proper waiting."""


class Starting:
    """`with Starting(settings, listener, make_config) as starting: starting.tell("waiting for rank 1")`.

    listener: bound; it is left open. make_config: uvicorn's configuration of an ASGI app.
    """

    def __init__(
        self, settings: Settings, listener: socket.socket, make_config: Callable[[Any, Settings], uvicorn.Config]
    ) -> None:
        self._reason = "starting"
        self._listener = listener.dup()  # uvicorn closes what it is given
        config = make_config(Gate(self._answer, settings), settings)
        config.timeout_graceful_shutdown = _LAST_ANSWERS_S
        self._server = _OnThread(config)
        self._thread = threading.Thread(target=self._run, name="hocket-starting", daemon=True)

    def tell(self, what: str) -> None:
        """Say what is waited for. From any thread."""
        self._reason = f"starting: {what}"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            answer: Response = Json({"status": "unavailable", "reason": self._reason}, 503)
        else:
            answer = response(unavailable(self._reason))
        answer.headers["retry-after"] = "1"
        await answer(scope, receive, send)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._listener]))

    def __enter__(self) -> Starting:
        self._listener.listen(self._server.config.backlog)  # from now on nobody's connection is refused
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


class _OnThread(uvicorn.Server):
    """uvicorn's, which leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
