"""Reasoning and tool calls through the server, over ranks that say what the test wants: whole and streamed the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fake_server import FakeServed, serving
from test_answer_parts import WEATHER, deepseek_v3, hermes

from hocket.errors import ConfigError
from hocket.server.errors import ApiError
from hocket.server.protocol import ChatRequest
from hocket.server.settings import Settings
from hocket.server.tools import tool_use

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if thinking }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "tools": [TOOL]}
PARSERS = Settings(port=0, reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServed]:
    with serving(PARSERS, chat_template=TEMPLATE) as served:
        yield served


@pytest.fixture
def served(shared: FakeServed) -> Iterator[FakeServed]:
    yield shared
    shared.until(shared.is_idle)


def gathered(chunks: list[Any]) -> tuple[dict[str, Any], str]:
    """The message and the finish reason that a stream's chunks make."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning": "", "tool_calls": []}
    reason = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def both(served: FakeServed, body: dict[str, Any]) -> tuple[str, str | None, list[tuple[str, str]], str]:
    """Reasoning, content, calls and finish reason of an answer, which are the same streamed."""
    status, answer = served.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert all(call["type"] == "function" and call["id"] for call in message.get("tool_calls", []))
    streamed, reason = gathered(served.stream(CHAT, body))
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in streamed["tool_calls"]] == calls
    assert (streamed["content"], streamed["reasoning"]) == (message["content"] or "", message["reasoning"] or "")
    assert (streamed["role"], reason) == ("assistant", choice["finish_reason"])
    assert message["reasoning"] == message["reasoning_content"]
    return message["reasoning"] or "", message["content"], calls, reason


def test_reasoning_and_calls(served: FakeServed) -> None:
    served.text = f"<think>\nThe lady asks.\n</think>\n\nI look.\n{hermes('weather', WEATHER)}\n{hermes('now', '{}')}"
    calls = [("weather", WEATHER), ("now", "{}")]
    assert both(served, ASKED) == ("The lady asks.", "I look.", calls, "tool_calls")
    assert both(served, ASKED | {"parallel_tool_calls": False})[2] == calls[:1]
    served.text = hermes("weather", WEATHER)
    assert both(served, ASKED) == ("", None, [("weather", WEATHER)], "tool_calls")
    assert both(served, ASKED | {"tool_choice": "none"}) == ("", hermes("weather", WEATHER), [], "stop")
    served.text = "No need."
    assert both(served, ASKED) == ("", "No need.", [], "stop")


def test_arguments_are_streamed_as_they_come(served: FakeServed) -> None:
    served.text = hermes("weather", WEATHER)
    pieces = [
        call["function"]["arguments"]
        for chunk in served.stream(CHAT, ASKED)
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert pieces[0] == ""
    assert len(pieces) > 5
    assert "".join(pieces) == WEATHER


def test_a_call_that_is_cut_off_keeps_its_reason(served: FakeServed) -> None:
    served.text = hermes("weather", WEATHER)
    _, _, ((name, arguments),), reason = both(served, ASKED | {"max_tokens": len(served.token_ids) // 2})
    assert name == "weather"
    assert WEATHER.startswith(arguments)
    assert reason == "length"


def test_the_template_gets_tools_and_earlier_calls(served: FakeServed) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": "é"}'}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c", "content": "wet"},
    ]
    status, answer = served.post("/tokenize", {"messages": messages, "tools": [TOOL]})
    assert status == 200, answer
    text = served.llm.get_tokenizer().decode(answer["tokens"])
    assert text == '[weather]<user>Hello<assistant>Hm.{"a": "é"}<tool>wet<assistant>'
    call["function"]["arguments"] = "{"  # type: ignore[index]
    status, answer = served.post(CHAT, {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_r120_stop_strings_count_after_the_reasoning(served: FakeServed) -> None:
    served.text = "<think>It may stop here.</think>It is so. It may stop there."
    body = ASKED | {"stop": [" may stop"]}
    assert both(served, body) == ("It may stop here.", "It is so. It", [], "stop")
    served.text = "It may stop here.</think>It is so. It may stop there."
    thinking = body | {"chat_template_kwargs": {"thinking": True}}  # the template writes <think>
    assert both(served, thinking) == ("It may stop here.", "It is so. It", [], "stop")
    assert both(served, body) == ("", "It", [], "stop")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "auto", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_is_wrong_is_named(served: FakeServed, change: dict[str, Any], param: str) -> None:
    status, answer = served.post(CHAT, ASKED | change)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_without_parsers_calls_must_be_asked_for() -> None:
    with serving(chat_template=TEMPLATE) as served:
        served.text = hermes("weather", "{}")
        status, answer = served.post(CHAT, ASKED)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert "--enable-auto-tool-choice" in answer["error"]["message"]
        served.text = WEATHER  # what the grammar would have made of it
        body = ASKED | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
        message = served.post(CHAT, body)[1]["choices"][0]
        assert message["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": WEATHER}
        assert (message["finish_reason"], "reasoning" in message["message"]) == ("stop", False)
        served.text = f'[{{"name": "weather", "parameters": {WEATHER}}}]'
        message = served.post(CHAT, ASKED | {"tool_choice": "required"})[1]["choices"][0]
        assert message["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": WEATHER}
        assert message["finish_reason"] == "tool_calls"


def test_a_template_without_a_place_for_tools() -> None:
    with serving(PARSERS) as served:
        status, answer = served.post(CHAT, ASKED)
    assert (status, answer["error"]["param"]) == (400, "tools")


def test_deepseek_through_the_server() -> None:
    settings = Settings(
        port=0, reasoning_parser="deepseek_r1", tool_call_parser="deepseek_v3", enable_auto_tool_choice=True
    )
    with serving(settings, chat_template=TEMPLATE) as served:
        served.text = f"It rains.</think>I look.{deepseek_v3(('weather', WEATHER))}"
        assert both(served, ASKED) == ("It rains.", "I look.", [("weather", WEATHER)], "tool_calls")


def test_the_official_client_runs_a_round_of_calls(served: FakeServed) -> None:
    openai = pytest.importorskip("openai")
    served.text = f"<think>Hm.</think>I look.\n{hermes('weather', WEATHER)}"
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        message = client.chat.completions.create(model="tiny", **ASKED).choices[0].message
        with client.chat.completions.stream(model="tiny", **ASKED) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for said in (message, streamed):
            assert (said.content, said.reasoning) == ("I look.", "Hm.")
            assert [(call.function.name, call.function.arguments) for call in said.tool_calls] == [("weather", WEATHER)]
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}
        served.text = "It is wet."
        more = client.chat.completions.create(model="tiny", messages=[*ASKED["messages"], message, answer])
        assert more.choices[0].message.content == "It is wet."


def test_tools_of_many_levels(served: FakeServed) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"properties": {"a": schema}}
    body = json.dumps(ASKED | {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]})
    for choice in ("auto", "required"):
        status, answer = served.post(CHAT, (body[:-1] + f', "tool_choice": "{choice}"}}').encode())
        assert status in (200, 400), answer


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_schema_too_deep_to_be_written_is_refused(choice: Any) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = ChatRequest.model_construct(tools=[tool], tool_choice=choice)
    with pytest.raises(ApiError) as caught:
        tool_use(body, None)
    assert (caught.value.status_code, caught.value.body["error"]["param"]) == (400, "tools")


def test_completions_have_no_tools(served: FakeServed) -> None:
    status, answer = served.post("/v1/completions", {"prompt": "Hello", "tools": [TOOL]})
    assert (status, answer["error"]["param"]) == (400, "tools")


def test_options_that_do_not_fit() -> None:
    for options in ({"reasoning_parser": "r1"}, {"tool_call_parser": "x"}, {"enable_auto_tool_choice": True}):
        with pytest.raises(ConfigError):
            Settings(**options)  # type: ignore[arg-type]
    json.loads(WEATHER)
