"""What the server answers, field by field, over ranks that say what the test wants: whole and streamed the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fake_server import FakeServed, serving
from served import JSON, events, parsed

from hocket.server import app

TEXT = "In the beginning there was a stop, and then there was none."
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 200}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], **LONG}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServed]:
    with serving() as served:
        yield served


@pytest.fixture
def served(shared: FakeServed) -> Iterator[FakeServed]:
    shared.text = TEXT
    yield shared
    shared.until(shared.is_idle)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


# -- completions ------------------------------------------------------------------------------------------------------


def test_a_completion_whole_and_streamed(served: FakeServed) -> None:
    body = {"model": "tiny", "prompt": "Hello", **LONG}
    status, answer = served.post(COMPLETIONS, body)
    assert status == 200
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "stop", None)
    num_prompt = len(served.llm.get_tokenizer().encode("Hello"))
    num_output = len(served.token_ids) + 1  # the end-of-text token too
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == num_output
    assert answer["usage"]["total_tokens"] == num_prompt + num_output
    chunks = served.stream(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    *parts, last = chunks
    assert text_of(parts) == TEXT
    assert len(parts) > 5
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {(chunks[0]["id"], chunks[0]["created"])}
    assert all(part["usage"] is None for part in parts)
    assert all("usage" not in chunk for chunk in served.stream(COMPLETIONS, body))


def test_the_default_is_sixteen_tokens(served: FakeServed) -> None:
    _, answer = served.post(COMPLETIONS, {"prompt": "Hello"})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


def test_usage_in_every_chunk(served: FakeServed) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.stream(COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_completions_are_numbered_in_order(served: FakeServed, stream: bool) -> None:
    ids = served.llm.get_tokenizer().encode("of the sea")
    body = {"prompt": ["Hello", "The lady"], "n": 2, "echo": True, "max_tokens": 3, "seed": 1}
    begin = served.llm.get_tokenizer().decode(served.token_ids[:3])
    if stream:
        chunks = served.stream(COMPLETIONS, body)
        texts = [text_of(chunks, index) for index in range(4)]
    else:
        texts = [choice["text"] for choice in served.post(COMPLETIONS, body)[1]["choices"]]
    assert texts == [f"{prompt}{begin}" for prompt in ("Hello", "Hello", "The lady", "The lady")]
    _, answer = served.post(COMPLETIONS, {"prompt": [ids, ids], "echo": True, "max_tokens": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["text"].endswith("of the sea" + begin[:2]) for choice in answer["choices"])


def test_logprobs_of_a_completion(served: FakeServed) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "logprobs": 2}
    _, answer = served.post(COMPLETIONS, body)
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    assert logprobs["token_logprobs"] == [-1.0] * 3
    assert all(-9999.0 in top.values() for top in logprobs["top_logprobs"])  # minus infinity in the engine
    sums = [sum(map(len, logprobs["tokens"][:i])) for i in range(3)]
    assert logprobs["text_offset"] == sums
    parts = [chunk["choices"][0]["logprobs"] for chunk in served.stream(COMPLETIONS, body)]
    for name, values in logprobs.items():
        assert [value for part in parts for value in part[name]] == values


def test_echo_with_logprobs_begins_with_the_prompt(served: FakeServed) -> None:
    body = {"prompt": "Hello there", "echo": True, "logprobs": 0, "max_tokens": 2}
    num_prompt = len(served.llm.get_tokenizer().encode("Hello there"))
    _, answer = served.post(COMPLETIONS, body)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-2.0] * (num_prompt - 1) + [-1.0] * 2
    assert logprobs["top_logprobs"][0] is None
    assert served.stream(COMPLETIONS, body)[0]["choices"][0]["text"].startswith("Hello there")
    _, answer = served.post(COMPLETIONS, body | {"max_tokens": 0})
    assert answer["choices"][0]["text"] == "Hello there"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == num_prompt
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_waits_for_the_completion_that_tells_of_the_prompt(served: FakeServed, stream: bool) -> None:
    body = {"prompt": "Hello there", "echo": True, "logprobs": 0, "max_tokens": 2, "n": 2, "seed": 1, "stream": stream}
    num_prompt = len(served.llm.get_tokenizer().encode("Hello there"))
    with served.paused():
        connection = served.connect()
        connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
        served.until(lambda: served.llm.client.num_requests_per_rank() == [1, 1])
        served.step([1])
    raw = connection.getresponse().read()
    connection.close()
    parts = [part for event in events(raw) for part in event["choices"]] if stream else parsed(raw)["choices"]
    for index in range(2):
        said = [value for part in parts if part["index"] == index for value in part["logprobs"]["token_logprobs"]]
        assert said == [None] + [-2.0] * (num_prompt - 1) + [-1.0] * 2


def test_echo_with_logprobs_aborted_before_the_first_token_shows_the_prompt(served: FakeServed) -> None:
    body = {"prompt": "Hello there", "echo": True, "logprobs": 0, "max_tokens": 2}
    num_prompt = len(served.llm.get_tokenizer().encode("Hello there"))
    with served.paused():
        connection = served.connect()
        connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
        served.until(lambda: served.model.client.num_requests == 1)
        assert served.post("/abort", {"abort_all": True})[0] == 200
        answer = connection.getresponse()
        assert answer.status == 200
        (choice,) = parsed(answer.read())["choices"]
    connection.close()
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "abort")
    assert choice["logprobs"]["token_logprobs"] == [None] * num_prompt


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_whole_and_streamed(served: FakeServed) -> None:
    status, answer = served.post(CHAT, HELLO)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
    assert (answer["object"], choice["logprobs"]) == ("chat.completion", None)
    chunks = served.stream(CHAT, HELLO | {"n": 2})
    assert chunks[0]["object"] == "chat.completion.chunk"
    for index in range(2):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in c["delta"] for c in own[1:])
        assert text_of(chunks, index) == TEXT
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_r123_top_logprobs_of_chat_is_a_list_even_where_it_is_empty(served: FakeServed, num_top: int | None) -> None:
    body = HELLO | {"max_tokens": 3, "logprobs": True} | ({} if num_top is None else {"top_logprobs": num_top})
    _, answer = served.post(CHAT, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [num_top or 0] * 3
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == answer["choices"][0]["message"]["content"]
    assert all(entry["logprob"] == -1.0 for entry in content)
    chunks = served.stream(CHAT, body)
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part] == content


def test_chat_goes_on_within_a_message(served: FakeServed) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True, "max_tokens": 1}
    _, answer = served.post(CHAT, body)
    prompt = served.llm.get_tokenizer().decode(answer["choices"][0]["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("I am")


def test_content_may_be_parts_of_text(served: FakeServed) -> None:
    def prompt_of(content: Any) -> list[int]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
        return served.post(CHAT, body)[1]["choices"][0]["prompt_token_ids"]

    assert prompt_of([{"type": "text", "text": "Hello"}]) == prompt_of("Hello")


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["stop", "a stop, and", "g there was a st", TEXT[3:40], ["nothing", "and then"]])
def test_r118_stop_strings_over_token_borders(served: FakeServed, path: str, include: bool, stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    found = next(s for s in stops if s in TEXT)
    expected = TEXT[: TEXT.index(found) + (len(found) if include else 0)]
    body = (HELLO if path == CHAT else {"prompt": "Hello", **LONG}) | {
        "stop": stop,
        "include_stop_str_in_output": include,
    }
    _, answer = served.post(path, body)
    choice = answer["choices"][0]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)
    chunks = served.stream(path, body)
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_character_of_several_tokens_comes_whole(served: FakeServed) -> None:
    served.text = "naïve 🜁 café"
    chunks = served.stream(COMPLETIONS, {"prompt": "Hello", **LONG})
    assert text_of(chunks) == "naïve 🜁 café"
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_tokens_and_text_and_back(served: FakeServed) -> None:
    tokenizer = served.llm.get_tokenizer()
    status, answer = served.post("/tokenize", {"prompt": "Hello there", "return_token_strs": True})
    assert (status, answer["tokens"]) == (200, tokenizer.encode("Hello there"))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    _, bare = served.post("/tokenize", {"prompt": "Hello there", "add_special_tokens": False})
    assert bare["tokens"] == tokenizer.encode("Hello there", add_special_tokens=False)
    assert served.post("/detokenize", {"tokens": bare["tokens"]}) == (200, {"prompt": "Hello there"})
    _, chat = served.post("/tokenize", {"messages": HELLO["messages"]})
    assert chat["tokens"] == tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True)


def test_texts_of_any_length_do_not_keep_the_loop(served: FakeServed, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noting(do: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(given: Any) -> Any:
            threads.append(threading.current_thread().name.rpartition("_")[0])
            return do(given)

        return noted

    tokenizer = served.llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "batch_decode", noting(tokenizer.batch_decode))
    monkeypatch.setattr(app, "parse_prompt", noting(app.parse_prompt))
    assert served.post("/tokenize", {"prompt": "Hello there", "return_token_strs": True})[0] == 200
    assert served.post("/detokenize", {"tokens": [5] * 5000})[0] == 200
    assert threads == ["hocket-tokenize"] * 2


def test_what_is_served(served: FakeServed) -> None:
    status, answer = served.ask("GET", "/v1/models")
    assert (status, [card["id"] for card in answer["data"]]) == (200, ["tiny"])
    assert answer["data"][0]["max_model_len"] == served.llm.config.scheduler.max_model_len
    assert served.ask("GET", "/v1/models/tiny")[1] == answer["data"][0]
    assert served.ask("GET", "/v1/models/other")[0] == 404
    for path in ("/health", "/ping", "/version"):
        assert served.ask("GET", path)[0] == 200
    assert served.ask("GET", "/load") == (200, {"server_load": 0, "ranks": [{"requests": 0, "tokens": 0}] * 2})


def test_the_api_document_names_every_field(served: FakeServed) -> None:
    from hocket.server.protocol import ChatRequest, CompletionRequest

    _, document = served.ask("GET", "/openapi.json")
    for model in (ChatRequest, CompletionRequest):
        assert document["components"]["schemas"][model.__name__]["properties"].keys() == model.model_fields.keys()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, {"prompt": "Hello"}),
        ("POST", COMPLETIONS, {"prompt": "Hello", "stream": True}),
        ("POST", CHAT, HELLO | {"stream": True}),
        ("GET", "/metrics", None),
        ("GET", "/load", None),
    ],
)
def test_the_api_document_names_what_answers_are_made_of(served: FakeServed, method: str, path: str, body: Any) -> None:
    _, document = served.ask("GET", "/openapi.json")
    connection = served.connect()
    connection.request(method, path, json.dumps(body) if body else None, JSON if body else {})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in document["paths"][path][method.lower()]["responses"][str(answer.status)]["content"]


def test_seeds_repeat_and_penalties_arrive(served: FakeServed) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "allowed_token_ids": [1, 2, 9],
    }
    body = {"prompt": "Hello", "max_tokens": 3, "logit_bias": {"5": 400, "6": -1}, "user": "me", **given}
    assert served.post(COMPLETIONS, body)[0] == 200
    params = served.group.sent[-1][1].requests[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {5: 100.0, 6: -1.0}


def test_token_ids_without_a_tokenizer() -> None:
    with serving(skip_tokenizer_init=True) as served:
        served.token_ids = [7, 8, 9]
        body = {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True, "logprobs": 0}
        _, answer = served.post(COMPLETIONS, body)
        assert answer["choices"][0]["token_ids"] == [7, 8, 9]
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:8", "token_id:9"]
        chunks = served.stream(COMPLETIONS, body)
        assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == [7, 8, 9]
        for path, refused in ((COMPLETIONS, {"prompt": "text"}), (CHAT, HELLO), ("/tokenize", {"prompt": "text"})):
            status, answer = served.post(path, refused)
            assert (status, answer["error"]["param"]) == (400, "skip_tokenizer_init")
