"""The endpoints. Knows how they are reached, and leaves what they do to others."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from hocket import __version__
from hocket.errors import ConfigError
from hocket.metrics.show import Metrics
from hocket.prompt import parse_prompt
from hocket.server import errors
from hocket.server.answers import answer, check_model
from hocket.server.chat import ChatForm, render
from hocket.server.completions import CompletionForm
from hocket.server.errors import ApiError, Json
from hocket.server.gate import Gate
from hocket.server.profile import MAX_STEPS, NUM_STEPS, Phase, Profiler
from hocket.server.protocol import AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hocket.server.served_model import ServedModel
from hocket.server.settings import Settings

_MAX_LENIENT_BYTES = 2**16
_ODD_VALUES = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]")
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class _JsonRequest(Request):
    """A request whose body is JSON, read strictly and fast."""

    async def json(self) -> Any:
        raw = await self.body()
        try:
            return msgspec.json.decode(raw)
        except (ValueError, RecursionError) as error:
            value = _with_odd_values(raw)
            if value is None:
                raise ApiError(400, f"the body is not valid JSON: {error}") from None
            return value


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and kind != "application/json":
                raise ApiError(415, "the body must be JSON, with the header 'Content-Type: application/json'")
            return await handle(_JsonRequest(request.scope, request.receive))

        return checked


def make_app(served: ServedModel, settings: Settings) -> FastAPI:
    """The ASGI app over a model that is served."""
    names = settings.served_model_names or (served.options.model,)
    app = FastAPI(title="Hocket", version=__version__, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    errors.install(app)
    metrics = Metrics(served.llm.config, names[0], settings.metrics_names, served.llm.client.group.ranks)
    served.count_into(metrics)
    app.include_router(_generating(served, names, settings))
    app.include_router(_texts(served, names))
    app.include_router(_looking(served, names, metrics))
    app.include_router(_profiling(Profiler(served, settings.profile_dir)))
    app.add_middleware(Gate, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _generating(served: ServedModel, names: tuple[str, ...], settings: Settings) -> APIRouter:
    router = APIRouter(route_class=_Route, responses=errors.DOCUMENTED)

    @router.post("/v1/completions", responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = check_model(body.model, names)
        form = CompletionForm(served, body, _answer_id("cmpl", request), model, _rank(request))
        return await answer(request, form)

    @router.post("/v1/chat/completions", responses=_STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Response:
        model = check_model(body.model, names)
        form = ChatForm(
            served=served,
            body=body,
            answer_id=_answer_id("chatcmpl", request),
            model=model,
            rank=_rank(request),
            reasoning_parser=settings.reasoning_parser,
            tool_parser=settings.tool_call_parser if settings.enable_auto_tool_choice else None,
        )
        return await answer(request, form)

    @router.post("/abort")
    async def abort(body: AbortRequest) -> Response:
        if body.abort_all:
            return Json({"aborted": served.client.abort_all()})
        ids = [body.request_id] if isinstance(body.request_id, str) else body.request_id or []
        return Json({"aborted": served.client.abort_answers(ids)})

    return router


def _texts(served: ServedModel, names: tuple[str, ...]) -> APIRouter:
    router = APIRouter(route_class=_Route, responses=errors.DOCUMENTED)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        check_model(body.model, names)
        if body.messages is None:
            text, special = body.prompt or "", body.add_special_tokens is not False
        else:
            text, special = await render(served, body, body.tools), bool(body.add_special_tokens)
        ids = await served.encode(text, add_special_tokens=special, is_prompt=False)
        answer = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await served.texts_of(ids)
        return Json(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        check_model(body.model, names)
        limit = served.need_tokenizer().vocab_size
        ids = await served.on_thread(lambda: _token_ids(body.tokens, limit))
        return Json({"prompt": await served.decode(ids)})

    return router


def _token_ids(given: Any, limit: int) -> list[int]:
    try:
        ids = parse_prompt({"prompt_token_ids": given}).token_ids or []
    except ConfigError as error:
        raise errors.api_error(error, names={"prompt": "tokens", "prompt_token_ids": "tokens"}) from None
    if any(i >= limit for i in ids):
        raise ApiError(400, f"tokens: token ids are below {limit}", param="tokens")
    return ids


def _looking(served: ServedModel, names: tuple[str, ...], metrics: Metrics) -> APIRouter:
    router = APIRouter(route_class=_Route, responses=errors.DOCUMENTED)
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "hocket",
            "root": served.options.model,
            "max_model_len": served.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [card(name) for name in names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return Json(card(check_model(name, names)))

    @router.get("/version")
    async def version() -> Response:
        return Json({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        return Json({"server_load": served.client.num_requests, "ranks": served.loads()})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        text = await metrics.scrape(served.client.ask_counters)
        return Response(text, headers={"content-type": metrics.content_type})

    async def health() -> Response:
        if served.problem is not None:
            return Json({"status": "unavailable", "reason": served.problem}, 503)
        return Json({"status": "ok"})

    for path, method in (("/health", "GET"), ("/ping", "GET"), ("/ping", "POST")):
        router.add_api_route(path, health, methods=[method])
    return router


def _profiling(profiler: Profiler) -> APIRouter:
    router = APIRouter(route_class=_Route, responses=errors.DOCUMENTED)

    @router.post("/start_profile")
    async def start_profile(
        num_steps: Annotated[int, Query(ge=1, le=MAX_STEPS, description="record so many steps, at most")] = NUM_STEPS,
        phase: Annotated[Phase, Query(description="only steps of this kind; any: of both")] = "any",
    ) -> Response:
        profiler.start(num_steps, phase)
        return Json({"status": "recording", "num_steps": num_steps, "phase": phase})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        return Json(await profiler.stop())

    return router


def _answer_id(kind: str, request: Request) -> str:
    """A new id, or one with what the caller sent as X-Request-Id, for /abort and for logs."""
    given = request.headers.get("x-request-id")
    if given is None:
        return f"{kind}-{uuid.uuid4().hex}"
    if not _REQUEST_ID.fullmatch(given):
        message = "X-Request-Id: up to 128 letters, digits and any of . : _ -"
        raise ApiError(400, message, param="X-Request-Id")
    return f"{kind}-{given}"


def _rank(request: Request) -> int | None:
    """The rank that the caller wants, as the header X-Data-Parallel-Rank."""
    given = request.headers.get("x-data-parallel-rank")
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > 9:
        raise ApiError(400, "X-Data-Parallel-Rank: the number of a rank, from 0", param="X-Data-Parallel-Rank")
    return int(given)


def _with_odd_values(raw: bytes) -> Any:
    """A short body with NaN, Infinity or half a character in it, which are no JSON but are sent: for the field to be
    named. None where it is not that."""
    if len(raw) > _MAX_LENIENT_BYTES or not _ODD_VALUES.search(raw):
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
