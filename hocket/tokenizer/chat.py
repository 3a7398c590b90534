"""Chat messages to one prompt text, by the model's template. Knows nothing of tokens and of what answers look like."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hocket.errors import ConfigError
from hocket.tokenizer.tokenizer import Tokenizer, read_tokenizer_config

# A template that looks into lists of content parts itself: it iterates over them, or asks what kind of value it has.
_LOOKS_INTO_CONTENT = re.compile(
    r"in\s+\w+(\.content|\[['\"]content['\"]\])|content(['\"]\])?\s+is\s+(not\s+)?(string|iterable|sequence|mapping)"
)
# A template that writes a call's arguments as JSON itself, or goes through them; and one that asks what they are.
_WANTS_OBJECTS = re.compile(r"arguments(['\"]\])?\s*(\|\s*(tojson|items)|\.items)")
_TAKES_TEXT = re.compile(r"arguments(['\"]\])?\s+is\s+(not\s+)?(string|mapping)")
_CONTINUE_MARK = "\ue000continue here\ue000 "
_HINT = "a model with a chat template, or --chat-template FILE (or the template itself)"


class ChatTemplate:
    """The chat template(s) of a model, rendered as transformers renders them.

    templates: name -> Jinja source; the usual one is named "default". special_tokens: bos_token and so on, which
    templates refer to.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self._environment: ImmutableSandboxedEnvironment | None = None
        self._compiled: dict[str, Template] = {}

    @classmethod
    def from_pretrained(cls, path: str | Path, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The template of a tokenizer's directory; `override`: a file, Jinja source, or the name of one of several.

        Raises ConfigError when `override` is neither. A model without any template fails at `render`.
        """
        templates = read_templates(Path(path))
        if override is not None:
            templates["default"] = _read_override(override, templates)
        return cls(templates, tokenizer.special_tokens)

    def check(self) -> None:
        """Raises ConfigError where the usual template is not valid Jinja, or there is none."""
        self._compile(self._source(has_tools=False))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. Tokenize it without special tokens: the template writes them itself.

        continue_final_message: end within the last message instead of closing it. variables: further ones for the
        template, such as enable_thinking.

        Raises ConfigError when there is no template or the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise ConfigError("add_generation_prompt", True, "False", where="with continue_final_message")
        chat = [_plain(message) for message in messages]
        if not chat or not all(isinstance(message, dict) and "role" in message for message in chat):
            raise ConfigError("messages", len(chat), 'at least one, each {"role": …, "content": …}')
        if continue_final_message:
            chat[-1]["content"] = _with_mark(chat[-1].get("content"))
        source = self._source(has_tools=bool(tools))
        if tools and "tools" not in source:
            raise ConfigError("tools", len(tools), "none", where="where the chat template has no place for them")
        if _WANTS_OBJECTS.search(source) and not _TAKES_TEXT.search(source):
            for message in chat:
                _parse_arguments(message)
        if not _LOOKS_INTO_CONTENT.search(source):
            for message in chat:
                message["content"] = _joined(message.get("content"))
        try:
            text = self._compile(source).render(
                messages=chat,
                tools=_plain(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self.special_tokens | {name: _plain(value) for name, value in variables.items()}),
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = [message["role"] for message in chat]
            raise ConfigError("messages", roles, f"what the chat template accepts ({error})") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _source(self, *, has_tools: bool) -> str:
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if self.templates:
            names = ", ".join(sorted(self.templates))
            raise ConfigError("chat_template", None, f"one of the model's, by name ({names}): none is the default")
        raise ConfigError("chat_template", None, _HINT)

    def _compile(self, source: str) -> Template:
        template = self._compiled.get(source)
        if template is None:
            if self._environment is None:
                self._environment = _make_environment()
            try:
                template = self._compiled[source] = self._environment.from_string(source)
            except TemplateError as error:
                raise ConfigError("chat_template", source[:80], f"valid Jinja ({error})") from error
        return template


def read_templates(path: Path) -> dict[str, str]:
    """Templates of a tokenizer's directory: name -> source.

    chat_template.jinja and additional_chat_templates/NAME.jinja, else the entry of tokenizer_config.json.
    """
    directory = path if path.is_dir() else path.parent
    files = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if os.path.lexists(directory / "chat_template.jinja"):
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: _read(file) for name, file in files.items()}
    entry = read_tokenizer_config(directory).get("chat_template")
    if entry is None:
        return {}
    try:
        named = {"default": entry} if isinstance(entry, str) else {item["name"]: item["template"] for item in entry}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(part, str) for item in named.items() for part in item):
        raise ConfigError("chat_template", entry, "text, or a list of objects with name and template")
    return named


def _read_override(override: str, templates: Mapping[str, str]) -> str:
    if override in templates:
        return templates[override]
    if "{" in override or "\n" in override:
        return override
    return _read(Path(override).expanduser())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("chat_template", str(file), f"a readable file, or Jinja source ({error})") from error


def _plain(value: Any) -> Any:
    """A copy made of JSON types only: template code from a checkpoint gets no object with methods to misuse."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise ConfigError("messages", value, "text, numbers, lists and dicts")


def _joined(content: Any) -> Any:
    """Content given as text parts, as one text of lines, for templates that expect text."""
    is_text = isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content)
    return "\n".join(str(part.get("text", "")) for part in content) if content and is_text else content


def _parse_arguments(message: dict[str, Any]) -> None:
    """Make objects of the arguments of a message's tool calls, which may be given as text."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(arguments, str):
            continue
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise ConfigError("messages", arguments, "JSON, as a tool call's arguments") from None


def _with_mark(content: Any) -> Any:
    """The last message's content with a mark behind its (last) text."""
    if isinstance(content, str):
        return content + _CONTINUE_MARK
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += _CONTINUE_MARK
                return content
    raise ConfigError("continue_final_message", True, "False", where="where the last message has no text")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        where = "where the chat template leaves the last message out"
        raise ConfigError("continue_final_message", True, "False", where=where)
    # A template that trims the content took the mark's own space, and so would have taken the content's.
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """namespace() without names that begin with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template must not set {name!r} of a namespace")
        super().__setitem__(name, value)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters and sorts keys; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
