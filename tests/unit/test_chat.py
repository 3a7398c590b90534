"""Chat templates: the same text as transformers renders, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import BOS, EOS, byte_level, save

from hocket.errors import ConfigError
from hocket.tokenizer.chat import ChatTemplate

CHATML = """\
{%- if tools %}
    {{- '<|system|>' + tools | tojson + '\\n' }}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join %}
    {%- endif %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- content + eos_token }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {% if loop.last %}
    {% break %}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""
TOOLS = [
    {"type": "function", "function": {"name": "größe", "description": "<b> & 'x'", "parameters": {"b": 1, "a": 2}}}
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi 你好"}],
    [{"role": "system", "content": " S "}, {"role": "user", "content": "u\n"}, {"role": "assistant", "content": "a"}],
    [{"role": "skip", "content": "-"}, {"role": "user", "content": [{"type": "text", "text": "p1"}, {"text": "p2"}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"k": "ü"}}}]}],
]


def template(source: str = CHATML) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": BOS, "eos_token": EOS})


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equals_transformers(tmp_path: Path, chat: list[dict[str, Any]], tools: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
    theirs = PreTrainedTokenizerFast.from_pretrained(str(save(tmp_path, config)))
    ours = ChatTemplate.from_pretrained(tmp_path, byte_level())
    for variables in ({}, {"enable_thinking": False}):
        for prompt in (True, False):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, **variables}
            assert ours.render(chat, **options) == theirs.apply_chat_template(chat, tokenize=False, **options)
    if isinstance(chat[-1]["content"], str):
        text = ours.render(chat, add_generation_prompt=False, continue_final_message=True)
        assert text == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)


def test_continue_final_message() -> None:
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "So it is "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert template().render(chat, **options).endswith("<|assistant|>So it is ")
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]}]
    assert template().render(parts, **options).endswith("<|assistant|>onetwo ")
    assert parts[0]["content"][1]["text"] == "two "  # type: ignore[index]
    trimming = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
    assert template(trimming).render(chat, **options) == "[u][So it is"
    with pytest.raises(ConfigError, match="add_generation_prompt"):
        template().render(chat, continue_final_message=True)
    with pytest.raises(ConfigError, match="leaves the last message out"):
        template("x").render(chat, **options)
    with pytest.raises(ConfigError, match="has no text"):
        template().render([{"role": "assistant", "content": None}], **options)


def test_where_templates_are_found(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": "config"})
    user = [{"role": "user", "content": "u"}]
    assert ChatTemplate.from_pretrained(tmp_path, byte_level()).render(user) == "config"
    assert ChatTemplate.from_pretrained(tmp_path / "tokenizer.json", byte_level()).render(user) == "config"

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, {"chat_template": named})
    both = ChatTemplate.from_pretrained(tmp_path, byte_level())
    assert both.render(user) == "plain"
    assert both.render(user, tools=TOOLS) == "tools"
    assert ChatTemplate.from_pretrained(tmp_path, byte_level(), "tool_use").render(user) == "tools"

    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag file")
    files = ChatTemplate.from_pretrained(tmp_path, byte_level())
    assert files.templates == {"default": "file", "rag": "rag file"}

    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    assert ChatTemplate.from_pretrained(tmp_path, byte_level(), str(mine)).render(user) == "mine"
    assert ChatTemplate.from_pretrained(tmp_path, byte_level(), "{{ 1 + 1 }}").render(user) == "2"


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "u"}]
    save(tmp_path, {})
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplate.from_pretrained(tmp_path, byte_level()).render(user)
    with pytest.raises(ConfigError, match=r"no\.jinja"):
        ChatTemplate.from_pretrained(tmp_path, byte_level(), "no.jinja")
    save(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(ConfigError, match="rag"):
        ChatTemplate.from_pretrained(tmp_path, byte_level()).render(user)
    with pytest.raises(ConfigError, match="valid Jinja"):
        template("{% if %}").render(user)
    with pytest.raises(ConfigError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(user)
    for messages in ([], [{"content": "x"}], [{"role": "user", "content": object()}]):
        with pytest.raises(ConfigError, match="messages"):
            template().render(messages)


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    for wrong in (3, [3], [{"name": "default"}], [{"name": "default", "template": 5}]):
        save(tmp_path, {"chat_template": wrong})
        with pytest.raises(ConfigError, match="chat_template"):
            ChatTemplate.from_pretrained(tmp_path, byte_level())
    (tmp_path / "chat_template.jinja").mkdir()  # as unreadable to root as to anybody
    with pytest.raises(ConfigError, match="readable"):
        ChatTemplate.from_pretrained(tmp_path, byte_level())
    (tmp_path / "chat_template.jinja").rmdir()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="readable"):
        ChatTemplate.from_pretrained(tmp_path, byte_level())


def test_templates_are_shut_in() -> None:
    user = [{"role": "user", "content": "u"}]
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_a=1) }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(ConfigError):
            template(source + "{{ raise_exception('reached') if false }}").render(user)


def test_helpers() -> None:
    user = [{"role": "user", "content": "u"}]
    year = template("{{ strftime_now('%Y') }}").render(user)
    assert year.isdigit()
    assert len(year) == 4
    assert template("{{ {'b': '<é>', 'a': 1} | tojson }}").render(user) == json.dumps(
        {"b": "<é>", "a": 1}, ensure_ascii=False
    )
    counter = "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}"
    chat = template(counter)
    assert [chat.render(user), chat.render(user)] == ["2", "2"]


def test_text_parts_are_joined_for_templates_that_expect_text() -> None:
    parts = [{"type": "text", "text": "Who was"}, {"type": "text", "text": "Emma?"}]
    plain = ChatTemplate({"default": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"}, {})
    assert plain.render([{"role": "user", "content": parts}]) == "user: Who was\nEmma?"
    looks = "{% for m in messages %}{% for part in m['content'] %}<{{ part['text'] }}>{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": looks}, {}).render([{"role": "user", "content": parts}]) == "<Who was><Emma?>"
    asks = "{% for m in messages %}{% if m.content is string %}text{% else %}parts{% endif %}{% endfor %}"
    assert ChatTemplate({"default": asks}, {}).render([{"role": "user", "content": parts}]) == "parts"
