"""What a server answers before its ranks are there: why it cannot serve yet, within the same limits as later."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")
from served import JSON, LIMIT_S, parsed

from hocket.errors import ConfigError
from hocket.server import run
from hocket.server.settings import Settings
from hocket.server.starting import Starting


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        raw = None if body is None else json.dumps(body)
        connection.request(method, path, raw, headers | (JSON if body is not None else {}))
        answer = connection.getresponse()
        return answer.status, parsed(answer.read()), answer.headers["retry-after"]
    finally:
        connection.close()


def test_r114_not_ready_and_why() -> None:
    """Probes and requests get 503 with what is waited for; a client without the key learns nothing."""
    settings = Settings(port=0, api_keys=("secret",))
    with run._listen(settings) as listener:
        port = listener.getsockname()[1]
        with Starting(settings, listener, run._config) as starting:
            assert ask(port, "GET", "/health") == (503, {"status": "unavailable", "reason": "starting"}, "1")
            starting.tell("waiting for rank 1 to start")
            reason = "starting: waiting for rank 1 to start"
            for path in ("/health", "/ping"):
                assert ask(port, "GET", path) == (503, {"status": "unavailable", "reason": reason}, "1")
            body = {"prompt": "Hello"}
            assert ask(port, "POST", "/v1/completions", body)[0] == 401
            status, answer, _ = ask(port, "POST", "/v1/completions", body, Authorization="Bearer secret")
            assert (status, answer["error"]["message"]) == (503, reason)
            assert answer["error"]["code"] == "engine_unavailable"
        # Who comes before the server proper takes over waits in the queue.
        late = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        listener.settimeout(LIMIT_S)
        accepted, _ = listener.accept()
        accepted.close()
        late.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_client_that_dawdles_does_not_keep_the_server_from_starting(sent: bytes) -> None:
    settings = Settings(port=0)
    with run._listen(settings) as listener:
        port = listener.getsockname()[1]
        with Starting(settings, listener, run._config), socket.create_connection(("127.0.0.1", port), LIMIT_S) as slow:
            slow.sendall(sent)
            assert ask(port, "GET", "/health")[0] == 503
            began = time.monotonic()
        assert time.monotonic() - began < settings.header_timeout_s / 2


def test_an_address_that_is_not_here_is_told_from_a_port_that_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"^host: '192\.0\.2\.1' is not allowed; allowed: an address or name of this"):
        run._listen(Settings(host="192.0.2.1", port=0))  # TEST-NET-1, which no host has
    with run._listen(Settings(port=0)) as listener:
        port = listener.getsockname()[1]
        listener.listen()
        with pytest.raises(ConfigError, match=f"^port: {port} is not allowed on 127.0.0.1: Address already in use"):
            run._listen(Settings(port=port))
