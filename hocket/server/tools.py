"""What a chat request says of tools: which the model is told of, and how its calls are found. Knows no answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.errors import ConfigError
from hocket.server.errors import ApiError
from hocket.server.protocol import ChatRequest
from hocket.server.tool_calls import PARSERS, CallFinder, ListedCalls, OneCall, ToolCalls

_NAME = re.compile(r"[\w.:/-]{1,256}")


@dataclass(frozen=True)
class ToolUse:
    """Of one request. tools: for the template. finder: makes what finds calls in an answer. schema: what every answer
    must be, as a JSON schema, where it must be calls; is_named: of one tool that the request names. marks: texts that
    must not be left out of an answer."""

    tools: list[Any] | None = None
    finder: Callable[[], CallFinder] | None = None
    schema: str | None = None
    is_named: bool = False
    marks: tuple[str, ...] = ()


def check_parser(parser: str | None, *, auto: bool) -> None:
    """Raise ConfigError for options that do not fit."""
    if parser is not None and parser not in PARSERS:
        raise ConfigError("tool_call_parser", parser, ", ".join(PARSERS))
    if auto and parser is None:
        raise ConfigError("enable_auto_tool_choice", True, "with --tool-call-parser", where="without a parser")


def tool_use(body: ChatRequest, parser: str | None) -> ToolUse:
    """What a request asks for. parser: finds calls that the model makes as it likes; None: it cannot.

    Raises:
        ApiError: tools or tool_choice are wrong.
    """
    functions = _functions(body.tools or [])
    choice: Any = body.tool_choice or ("auto" if functions else "none")
    if choice == "none":
        return ToolUse()
    if not functions:
        raise _wrong("tool_choice", "only with tools")
    if choice == "auto":
        if parser is None:
            message = '"auto" needs a server with --enable-auto-tool-choice and --tool-call-parser'
            raise _wrong("tool_choice", message)
        syntax = PARSERS[parser]
        return ToolUse(body.tools, lambda: ToolCalls(syntax), marks=syntax.marks)
    if body.response_format is not None and body.response_format.type != "text":
        raise _wrong("tool_choice", "calls cannot follow response_format too: give one of both")
    if choice == "required":
        return ToolUse(
            body.tools, ListedCalls, _listed_schema(functions, several=body.parallel_tool_calls is not False)
        )
    name = choice["function"]["name"] if _is_function(choice) else None
    if name not in functions:
        raise _wrong("tool_choice", f"none, auto, required, or one of the tools: {', '.join(functions)}")
    return ToolUse(body.tools, lambda: OneCall(name), _dumped(_parameters(functions[name])), is_named=True)


def _functions(tools: list[Any]) -> dict[str, Any]:
    """The tools, by name."""
    found: dict[str, Any] = {}
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if not _is_function(tool):
            raise _wrong(where, 'an object {"type": "function", "function": {"name": …, "parameters": …}} is needed')
        function = tool["function"]
        if not _NAME.fullmatch(function["name"]) or function["name"] in found:
            raise _wrong(f"{where}.function.name", "letters, digits and _ . : / -, and no name twice")
        if not isinstance(function.get("parameters"), dict | None):
            raise _wrong(f"{where}.function.parameters", "a JSON schema is needed")
        found[function["name"]] = function
    return found


def _is_function(given: Any) -> bool:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parameters(function: Any) -> Any:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _listed_schema(functions: dict[str, Any], *, several: bool) -> str:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": _parameters(function)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, function in functions.items()
    ]
    most = {} if several else {"maxItems": 1}
    return _dumped({"type": "array", "items": {"anyOf": calls}, "minItems": 1} | most)


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise _wrong("tools", "parameters of so many levels cannot be followed") from None


def _wrong(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", param=field)
