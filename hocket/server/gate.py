"""What stands before the endpoints: API keys, and limits on bodies and on requests at once. Knows no endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.server.errors import ApiError, response
from hocket.server.settings import Settings

OPEN_PATHS = ("/health", "/ping")
"""Answered without a key: probes have none."""


class Gate:
    """ASGI middleware. Bodies are read whole, within their limits, before the app sees the request."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        is_counted = False
        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers)
            if scope["type"] == "http" and scope["method"] in ("POST", "PUT", "PATCH"):
                self._check_load()
                self.num_requests += 1
                is_counted = True
                receive = await self._with_body(headers, receive)
            await self._app(scope, receive, send)
        except ApiError as error:
            await response(error)(scope, receive, send)
        finally:
            self.num_requests -= is_counted

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Takes as long whichever key is right, and whether any is."""
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            message = "a valid API key is needed, as the header 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_load(self) -> None:
        limit = self._settings.max_concurrent_requests
        if self.num_requests >= limit:
            message = f"{limit} requests are being answered, the most at once (--max-concurrent-requests): try again"
            raise ApiError(
                429, message, kind="overloaded_error", code="too_many_requests", headers={"retry-after": "1"}
            )

    async def _with_body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """A `receive` that gives the whole body at once, and then what comes after it."""
        limit = self._settings.max_body_bytes
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said[:20]) > limit:
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in _chunks(receive):
                    body += chunk
                    if len(body) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            message = f"the body did not come within {self._settings.body_timeout_s:g} s"
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay


async def _chunks(receive: Receive) -> AsyncGenerator[bytes, None]:
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the client has gone: nobody reads the answer
            raise ApiError(400, "the body ended early", headers={"connection": "close"})
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes (--max-body-bytes)"
    return ApiError(413, message, code="request_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
