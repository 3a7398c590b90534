"""Tool calls that must be made, and traces of what is served, over two real ranks with overlap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
from gloo_groups import Groups
from served import Served

from hocket.server.settings import Settings
from hocket.trace import perfetto

CHAT = "/v1/chat/completions"
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
DUAL = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("sky", at={"enum": ["sea", "land"]}), tool("now")]
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "tools": TOOLS, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def served(groups: Groups, folder: Path) -> Iterator[Served]:
    with groups.llm("tiny", 2, skip_tokenizer_init=False, chat_template=TEMPLATE, **DUAL) as llm:
        served = Served(llm, Settings(port=0, profile_dir=str(folder)))
        yield served
        served.close()


def call_of(choice: dict[str, Any]) -> tuple[str, Any]:
    function = choice["message"]["tool_calls"][0]["function"]
    assert choice["message"]["content"] is None
    return function["name"], json.loads(function["arguments"])


def test_a_named_tool_is_called_with_arguments_of_its_schema(served: Served) -> None:
    body = ASKED | {"tool_choice": {"type": "function", "function": {"name": "sky"}}}
    status, answer = served.post(CHAT, body)
    assert status == 200, answer
    name, arguments = call_of(answer["choices"][0])
    assert (name, list(arguments)) == ("sky", ["at"])
    assert arguments["at"] in ("sea", "land")


def test_some_tool_is_called_where_one_must_be(served: Served) -> None:
    tokenizer = served.llm.get_tokenizer()
    blanks = {i: -100 for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).isspace()}  # liked
    body = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": blanks}
    status, answer = served.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    name, arguments = call_of(choice)
    assert name in ("sky", "now")
    assert set(arguments) == ({"at"} if name == "sky" else set())
    pieces = [
        call["function"]["arguments"]
        for chunk in served.stream(CHAT, body)
        for part in chunk["choices"]
        for call in part["delta"].get("tool_calls", [])
    ]
    assert json.loads("".join(pieces)) == arguments


def test_a_schema_that_cannot_be_followed_names_the_tools(served: Served) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "colour"}}}
    status, answer = served.post(CHAT, ASKED | {"tools": [bad], "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tools"), answer


def test_a_trace_of_what_is_served(served: Served, folder: Path) -> None:
    status, answer = served.post("/stop_profile", None)
    assert (status, answer["error"]["code"]) == (409, "profile_off")
    status, answer = served.ask("POST", "/start_profile?num_steps=0")
    assert (status, answer["error"]["param"]) == (400, "num_steps"), answer
    assert served.ask("POST", "/start_profile?num_steps=4&phase=decode")[0] == 200
    assert served.post("/stop_profile", None)[1]["error"]["code"] == "profile_empty"
    assert served.ask("POST", "/start_profile?num_steps=4&phase=decode")[0] == 200
    body = {"prompt": "In the beginning", "max_tokens": 12, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.post("/v1/completions", body)[0], range(8)))
    assert answers == [200] * 8
    status, answer = served.post("/stop_profile", None)
    assert status == 200, answer
    assert answer["num_steps"] == 4
    recording = perfetto.read(answer["events"])
    assert [len(steps) for steps in recording.ranks] == [4, 4]
    assert Path(answer["page"]).parent == folder
    assert "served" in recording.title
    assert served.post("/stop_profile", None)[0] == 409
