"""What stands before the endpoints: API keys, and limits on bodies and on requests at once. Knows no endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncGenerator, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.server.errors import ApiError, response
from hocket.server.settings import Settings

_WITH_BODY = ("POST", "PUT", "PATCH")
_MAX_BODIES = 32
"""So many bodies of the largest size may be held at once."""
OPEN_PATHS = ("/health", "/ping")
"""Answered without a key: probes have none."""
_UNCOUNTED_PATHS = (*OPEN_PATHS, "/abort")
"""Answered however many requests there are: a full server is well, and to end requests is what helps."""


class Gate:
    """ASGI middleware. Bodies are read whole, within their limits, before the app sees the request."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.strip().encode()) for key in settings.api_keys]
        self.num_requests = 0
        self._held_bytes = 0  # of bodies whose requests are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers)
            if scope["method"] not in _WITH_BODY:
                await self._app(scope, receive, send)
                return
            is_counted = scope["path"] not in _UNCOUNTED_PATHS
            if is_counted:
                self._check_load()
            with self._counted(int(is_counted)) as body:
                receive = await self._with_body(body, headers, receive)
                await self._app(scope, receive, send)
        except ApiError as error:
            await response(error)(scope, receive, send)

    @contextlib.contextmanager
    def _counted(self, num: int) -> Iterator[bytearray]:
        """A request is being answered, which counts as `num`; its body."""
        body = bytearray()
        self.num_requests += num
        try:
            yield body
        finally:
            self.num_requests -= num
            self._held_bytes -= len(body)

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
            raise _busy(f"{limit} requests are being answered, the most at once (--max-concurrent-requests): try again")

    async def _with_body(self, body: bytearray, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Reads the body. A `receive` that gives it whole, and then what comes after it."""
        limit = self._settings.max_body_bytes
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said[:20]) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in _chunks(receive):
                    body += chunk
                    self._held_bytes += len(chunk)
                    if len(body) > limit:
                        raise _too_large(limit)
                    if self._held_bytes > _MAX_BODIES * limit:
                        raise _busy("the bodies of all requests are too large together (--max-body-bytes): try again")
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


def _busy(message: str) -> ApiError:
    headers = {"retry-after": "1"}
    return ApiError(429, message, kind="overloaded_error", code="too_many_requests", headers=headers)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes (--max-body-bytes)"
    return ApiError(413, message, code="request_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
