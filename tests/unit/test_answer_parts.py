"""Reasoning and tool calls in answers: what is found, and that it is the same however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("fastapi")
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.server import tool_calls
from hocket.server.parts import AnswerParts
from hocket.tokenizer import reasoning
from hocket.tokenizer.detokenizer import StopChecker

V3 = tool_calls.PARSERS["deepseek_v3"]
SEP = tool_calls._SEP
CALLS, CALLS_END = V3.silent
WEATHER = '{"city": "Paris </think> {\\"x\\": \\"}\\"}", "days": [1, 2]}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek_v3(*calls: tuple[str, str]) -> str:
    one = [f"{V3.begin}function{SEP}{name}\n```json\n{arguments}\n```{V3.end}" for name, arguments in calls]
    return CALLS + "\n".join(one) + CALLS_END


def deepseek_v31(*calls: tuple[str, str]) -> str:
    return CALLS + "".join(f"{V3.begin}{name}{SEP}{arguments}{V3.end}" for name, arguments in calls) + CALLS_END


def finder(name: str) -> tool_calls.CallFinder:
    """What finds calls: the parser of that name, or for answers that a grammar made calls."""
    if name == "listed":
        return tool_calls.ListedCalls()
    return tool_calls.OneCall("one") if name == "one" else tool_calls.ToolCalls(tool_calls.PARSERS[name])


def parsed(pieces: list[str], start: str = "none", tools: str | None = None) -> tuple[str, str, list[list[str]]]:
    """Reasoning, content, and name and arguments of each call."""
    parts = AnswerParts(start, None if tools is None else finder(tools))
    thought, content, calls = "", "", list[list[str]]()
    for at, piece in enumerate(pieces):
        found = parts.feed(piece, is_last=at == len(pieces) - 1)
        thought, content = thought + found.reasoning, content + found.content
        for call in found.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert parts.num_calls == len(calls)
    return thought, content, calls


def test_calls_of_each_family() -> None:
    both = [["weather", WEATHER], ["now", "{}"]]
    text = f"I look.\n\n{hermes('weather', WEATHER)}\n{hermes('now', '{}')}"
    assert parsed([text], tools="hermes") == ("", "I look.", both)
    pairs = [("weather", WEATHER), ("now", "{}")]
    assert parsed(["I look." + deepseek_v3(*pairs)], tools="deepseek_v3") == ("", "I look.", both)
    assert parsed(["I look." + deepseek_v31(*pairs)], tools="deepseek_v31") == ("", "I look.", both)
    json.loads(WEATHER)


@pytest.mark.parametrize(
    ("block", "call"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', ["f", '{"a": 1}']),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ["f", '{"a": 1}']),
        ('{"name": "f"}', ["f", "{}"]),
        ('{"name": "f", "arguments": null}', ["f", "{}"]),
        ('{"name": "f", "parameters": {"a": "é"}}', ["f", '{"a": "é"}']),
        ('{"name": "a\\"b", "arguments": {}}', ['a"b', "{}"]),
        ('{"name": "f", "arguments": {"a": [1', ["f", '{"a": [1']),  # no JSON, but begun: the caller sees what is there
    ],
)
def test_calls_written_otherwise(block: str, call: list[str]) -> None:
    for end in ("</tool_call>", ""):
        assert parsed([f"<tool_call>{block}{end}"], tools="hermes") == ("", "", [call])


def test_what_is_no_call_stays_content() -> None:
    for text in ("<tool_call>no JSON</tool_call>", '<tool_call>{"name": 1}</tool_call>', "a <tool", "1 < 2  ", " "):
        assert parsed([text], tools="hermes") == ("", text, [])
    text = V3.begin + "nothing" + V3.end
    assert parsed([text], tools="deepseek_v3") == ("", text, [])
    assert parsed([hermes("f", "{}")]) == ("", hermes("f", "{}"), [])  # nobody asked


def test_a_call_that_is_not_closed_ends_where_the_next_begins() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {"b": '
    assert parsed([text], tools="hermes") == ("", "", [["f", '{"a": 1}'], ["g", '{"b": ']])


def test_calls_that_a_grammar_made() -> None:
    text = f'[{{"name": "weather", "parameters": {WEATHER}}}, {{"name": "now", "parameters": {{}}}}]'
    assert parsed([text], tools="listed") == ("", "", [["weather", WEATHER], ["now", "{}"]])
    assert parsed([WEATHER], tools="one") == ("", "", [["one", WEATHER]])


@pytest.mark.parametrize(
    ("start", "text", "thought", "content"),
    [
        ("open", "\nI think.\n</think>\n\nYes.", "I think.", "Yes."),
        ("open", "<think>I think.</think>Yes.", "I think.", "Yes."),
        ("open", "I think", "I think", ""),
        ("open", "I <think> </thi", "I <think> </thi", ""),
        ("maybe", "\n<think>\nI think.\n</think>\n\nYes. </think>", "I think.", "Yes. </think>"),
        ("maybe", " Yes. <think>", "", " Yes. <think>"),
        ("maybe", "<thi", "", "<thi"),
        ("none", "<think>Yes", "", "<think>Yes"),
        ("open", "</think>Yes", "", "Yes"),
    ],
)
def test_reasoning(start: str, text: str, thought: str, content: str) -> None:
    assert parsed([text], start) == (thought, content, [])
    assert parsed(list(text), start) == (thought, content, [])


def test_calls_come_after_the_reasoning() -> None:
    inside = hermes("no", "{}")
    text = f"<think>\nI may {inside}.\n</think>\n\n{hermes('yes', '{}')}"
    assert parsed([text], "maybe", "hermes") == (f"I may {inside}.", "", [["yes", "{}"]])


def test_the_prompt_says_how_the_answer_begins() -> None:
    assert reasoning.reasoning_start("qwen3", "<|im_start|>assistant\n") == "maybe"
    assert reasoning.reasoning_start("qwen3", "<|im_start|>assistant\n<think>\n") == "open"
    assert reasoning.reasoning_start("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n") == "none"
    assert reasoning.reasoning_start("deepseek_r1", "<Assistant>") == "open"
    assert reasoning.reasoning_start("deepseek_r1", "…", continued="<think>I") == "open"
    assert reasoning.reasoning_start("deepseek_r1", "…", continued="<think>I</think>Y") == "none"


PIECES = [
    *(
        "<think>",
        "</think>",
        "<",
        "<t",
        "</t",
        "\n",
        "  ",
        "a",
        "Yes.",
        '"',
        "\\",
        "{",
        "}",
        '{"name": "f", "arguments": ',
    ),
    *('{"name": "l", "parameters": {', "[", "}, "),
    *("<tool_call>", "</tool_call>", hermes("f", WEATHER), hermes("g", "[]"), '{"name": "h"}', CALLS, CALLS_END),
    *(V3.begin, V3.end, SEP, "function", deepseek_v3(("f", WEATHER)), deepseek_v31(("g", "{}"), ("h", '{"a": "<"}'))),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
TOOLS = st.sampled_from([None, "listed", "one", *tool_calls.PARSERS])
STARTS = st.sampled_from(["none", "maybe", "open"])


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces, of one character each where the seed is 0."""
    chance = random.Random(seed)
    places = [at for at in range(1, len(text)) if seed == 0 or chance.random() < chance.random()]
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, tools=TOOLS, start=STARTS, seed=st.integers(0, 5))
def test_any_cut_gives_the_same(text: str, tools: str | None, start: str, seed: int) -> None:
    assert parsed(cut(text, seed), start, tools) == parsed([text], start, tools)
    assert parsed([*cut(text, seed), ""], start, tools) == parsed([text], start, tools)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, start=STARTS, seed=st.integers(0, 5), stop=st.sampled_from(["Yes", "\n", "<", "a", "</think>"]))
def test_stop_strings_count_in_content_only(text: str, start: str, seed: int, stop: str) -> None:
    def stopped(pieces: list[str]) -> tuple[str, Any]:
        checker = StopChecker([stop], reasoning=start)
        for piece in pieces:
            if checker.append(piece):
                break
        return checker.text, checker.stop_string

    assert stopped(cut(text, seed)) == stopped([text])
    thought, content, _ = parsed([text], start)
    found, by = stopped([text])
    is_undecided = "<think>".startswith(text.lstrip())  # it ends before it is clear what it begins with
    assert (by is not None) == (stop in content) or (start == "maybe" and is_undecided)
    assert parsed([found], start)[0].startswith(thought)
    assert stop not in parsed([found], start)[1]
