"""Errors as OpenAI's clients expect them: status, message, type, param, code. Knows no endpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import Response

from hocket.errors import BackendUnavailable, CapacityError, ConfigError, HocketError, OverlapError
from hocket.server.async_client import Closed

logger = logging.getLogger(__name__)
INVALID = "invalid_request_error"
CLIENT_GONE = 499
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "error": {
                            "type": "object",
                            "properties": {
                                "message": {"type": "string"},
                                "type": {"type": "string"},
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "null"]},
                            },
                        }
                    },
                }
            }
        },
    }
    for status, description in (("4XX", "The request is wrong: param names the field"), ("5XX", "The engine failed"))
}
_MAX_SHOWN = 80
_MAX_MESSAGE = 700


class ApiError(HTTPException):
    """What a request is answered with instead. param: the field that is wrong; code: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = _clean(message, _MAX_MESSAGE)
        param = None if param is None else _clean(param, _MAX_SHOWN)
        super().__init__(status, message, headers)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _clean(text: str, most: int) -> str:
    """On one line, not too long, and such that JSON can hold it: callers' words come back in messages."""
    line = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    return (line if len(line) <= most else line[:most] + "…").encode(errors="backslashreplace").decode()


class Json(Response):
    """JSON of plain values, in which NaN cannot occur: msgspec writes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def unavailable(reason: str) -> ApiError:
    """The engine cannot take requests now."""
    return ApiError(503, reason, kind="service_unavailable_error", code="engine_unavailable")


def api_error(error: Exception, *, names: dict[str, str] | None = None) -> ApiError:
    """What an error means for the caller. names: the caller's name of a field, by ours."""
    names = names or {}
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        param = names.get(error.field, error.field)
        message = str(error)
        if param != error.field:
            message = param + message.removeprefix(error.field)
        return ApiError(400, message, param=param)
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), param=names.get("prompt", "prompt"), code="context_length_exceeded")
    if isinstance(error, BackendUnavailable):
        return ApiError(400, str(error), code="unsupported_parameter")
    if isinstance(error, OverlapError):
        return ApiError(500, f"{type(error).__name__}: {error}", kind="engine_error", code="engine_failed")
    return ApiError(500, f"{type(error).__name__}: {error}", kind="internal_error")


def install(app: FastAPI) -> None:
    """Have the app answer every error in this shape."""

    async def ours(_: Request, error: Exception) -> Response:
        if isinstance(error, Closed):
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        return response(api_error(error))

    async def unknown(request: Request, error: Exception) -> Response:
        if isinstance(error, AnyHTTPException):
            message = f"{request.method} {request.url.path}: {error.detail}"
            return response(ApiError(error.status_code, message, headers=dict(error.headers or {})))
        return await ours(request, error)

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return response(_of_fields(error.errors()))

    for kind in (ApiError, HocketError, Closed):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(AnyHTTPException, unknown)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(Exception, ours)


def response(error: ApiError) -> Response:
    return Json(error.body, error.status_code, error.headers)


def _of_fields(found: Sequence[Any]) -> ApiError:
    """The first wrong field, with all that is said about it (a value of several types is tried as each of them)."""
    first = _field(found[0]["loc"])
    said = dict.fromkeys(item["msg"] for item in found if _field(item["loc"]) == first)
    if found[0]["type"] == "extra_forbidden":
        return ApiError(400, f"{first}: this server knows no such field", param=first)
    got = "" if found[0]["type"] == "missing" else f" (got {_shown(found[0]['input'])})"
    message = "; or ".join(said)
    return ApiError(400, f"{first or 'the body'}: {message}{got}", param=first or None)


def _field(loc: Sequence[int | str]) -> str:
    """`messages[0]` of ("body", "messages", 0, …); what follows names the type that was tried."""
    parts = list(loc[1:])
    if not parts or isinstance(parts[0], int):
        return ""
    return str(parts[0]) + "".join(f"[{part}]" for part in parts[1:] if isinstance(part, int))


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists of thousands of levels
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
