"""The whole server on a thread of its own, and a plain HTTP client for it. Knows nothing of what ranks answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from hocket.config.options import Options
from hocket.errors import HocketError
from hocket.llm import LLM
from hocket.server import run
from hocket.server.app import make_app
from hocket.server.gate import Gate
from hocket.server.served_model import ServedModel
from hocket.server.settings import Settings

LIMIT_S = 20.0
JSON = {"content-type": "application/json"}


class Served:
    """A running server of an LLM, on a free port. ended: what the model ended with."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm = llm
        self.ended: list[HocketError] = []
        self._settings = settings
        self._listener = run._listen(settings)
        self.port = int(self._listener.getsockname()[1])
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(llm.options)), name="server", daemon=True
        )
        self._thread.start()
        assert self._ready.wait(LIMIT_S)

    async def _serve(self, options: Options) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = ServedModel(
            self.llm,
            options,
            restart=False,
            on_end=self.ended.append,
            prefix_affinity=self._settings.prefix_affinity,
        )
        app = make_app(self.model, self._settings)
        self._server = uvicorn.Server(run._config(app, self._settings))
        self._app = app
        self.loop.call_soon(self._ready.set)
        await self._server.serve([self._listener])
        self.model.close()

    @property
    def gate(self) -> Gate:
        """What stands before the endpoints; there once a request came."""
        layer: Any = self._app.middleware_stack
        while not isinstance(layer, Gate):
            layer = layer.app
        return layer

    def on_loop(self, what: Callable[[], Any]) -> Any:
        """`what` on the server's loop; its result."""

        async def call() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(LIMIT_S)

    def stats(self) -> list[dict[str, Any]]:
        """Counters of the ranks, by rank; while nothing runs."""
        return list(self.on_loop(self.llm.stats))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the server is so."""

        async def wait() -> None:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(LIMIT_S + 5)

    def is_idle(self) -> bool:
        """The front has nothing in flight."""
        client = self.llm.client
        return not (client.processor.num_unfinished or any(client.num_requests_per_rank()))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of one request. body: bytes as they are, anything else as JSON."""
        connection = self.connect()
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, raw, JSON | named if raw is not None else named)
            answer = connection.getresponse()
            return answer.status, parsed(answer.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return self.ask("POST", path, body, **headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, without the last one, [DONE]."""
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(body | {"stream": True}), JSON)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return events(answer.read())
        finally:
            connection.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def parsed(raw: bytes) -> Any:
    """JSON in which NaN and Infinity, which Python would take, are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON: {raw!r}")

    return json.loads(raw, parse_constant=refuse) if raw else None


def events(raw: bytes) -> list[Any]:
    """The messages of a whole event stream."""
    parts = raw.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [parsed(part.removeprefix(b"data: ")) for part in parts[:-2]]
