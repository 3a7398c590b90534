"""What the server refuses and cuts off: wrong fields by name, hostile bodies and connections; it goes on serving."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
from fake_server import FakeServed, serving
from served import JSON, LIMIT_S, events, parsed

from hocket.errors import ConfigError
from hocket.request import EngineRequest
from hocket.server.protocol import UNSUPPORTED, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hocket.server.settings import Settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LIMITS = Settings(
    port=0,
    max_body_bytes=2**17,
    header_timeout_s=0.4,
    body_timeout_s=0.4,
    send_timeout_s=0.4,
    max_concurrent_requests=8,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServed]:
    with serving(LIMITS) as served:
        yield served


@pytest.fixture
def served(shared: FakeServed) -> Iterator[FakeServed]:
    """Whatever a test has done, a good request is answered afterwards and nothing is left."""
    shared.text = "some words that follow"
    yield shared
    assert shared.post(COMPLETIONS, PROMPT)[0] == 200
    shared.until(shared.is_idle)
    assert not shared.ended


def refused(answer: tuple[int, Any], status: int, param: str | None) -> str:
    """Check a refusal's shape; its message."""
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert len(error["message"].splitlines()) == 1
    assert len(error["message"]) < 800
    return str(error["message"])


# -- fields -----------------------------------------------------------------------------------------------------------

WRONG_VALUES = [
    ("temperature", -1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 2**70),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", float("-inf")),
    ("repetition_penalty", 0),
    ("seed", 2**70),
    ("n", 0),
    ("n", 10**9),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("min_tokens", 9),
    ("min_tokens", -1),
    ("stop", ""),
    ("stop", ["x", ""]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 300),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**40]),
    ("allowed_token_ids", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"1": float("nan")}),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("bad_words", "word"),
    ("best_of", 2),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"pattern": "(", "type": "string"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 9] * 9000}}}),
    ("tools", {"type": "function"}),
    ("suffix", "the end"),
    ("no_such_field", 1),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value"), WRONG_VALUES, ids=lambda value: repr(value)[:20])
def test_a_wrong_value_is_refused_by_the_fields_name(served: FakeServed, path: str, field: str, value: Any) -> None:
    good = PROMPT if path == COMPLETIONS else HELLO
    assert field in refused(served.post(path, good | {field: value}), 400, field)


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        (COMPLETIONS, {}, "prompt", 400),
        (COMPLETIONS, {"prompt": None}, "prompt", 400),
        (COMPLETIONS, {"prompt": ""}, None, 200),  # its first token
        (COMPLETIONS, {"prompt": []}, "prompt", 400),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", 400),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", 400),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", 400),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", 400),
        (COMPLETIONS, {"prompt": [2**70]}, "prompt", 400),
        (COMPLETIONS, {"prompt": ["a"] * 1000, "n": 100}, "prompt", 400),
        (COMPLETIONS, {"prompt": "word " * 5000}, "prompt", 400),
        (COMPLETIONS, {"prompt": [5] * 5000}, "prompt", 400),
        (COMPLETIONS, {"prompt": [-1] * 5000}, "prompt", 400),  # not looked at one by one
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", 400),
        (COMPLETIONS, PROMPT | {"stop": "\ud800"}, "stop", 400),
        (COMPLETIONS, PROMPT | {"logprobs": 21}, "logprobs", 400),
        (COMPLETIONS, PROMPT | {"model": "other"}, "model", 404),
        (COMPLETIONS, PROMPT | {"stream_options": {"include_usage": True}}, "stream_options", 400),
        (COMPLETIONS, PROMPT | {"stream": True, "stream_options": {"x": True}}, "stream_options", 400),
        (COMPLETIONS, PROMPT | {"n": 2, "temperature": 0}, "n", 400),
        (CHAT, {}, "messages", 400),
        (CHAT, {"messages": []}, "messages", 400),
        (CHAT, {"messages": "Hello"}, "messages", 400),
        (CHAT, {"messages": ["Hello"]}, "messages[0]", 400),
        (CHAT, {"messages": [{"content": "Hello"}]}, "messages[0]", 400),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", 400),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", 400),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", 400),
        (CHAT, HELLO | {"top_logprobs": 2}, "top_logprobs", 400),
        (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", 400),
        (CHAT, HELLO | {"max_completion_tokens": 5}, "max_tokens", 400),
        (CHAT, {"messages": HELLO["messages"], "max_completion_tokens": 0}, "max_completion_tokens", 400),
        (CHAT, HELLO | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", 400),
        (CHAT, HELLO | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", 400),
        (CHAT, HELLO | {"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs", 400),
        (CHAT, HELLO | {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", 400),
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": HELLO["messages"]}, "prompt", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens", 400),
        ("/detokenize", {"tokens": "x"}, "tokens", 400),
        ("/detokenize", {"tokens": [2**40]}, "tokens", 400),
        ("/abort", {}, "request_id", 400),
        ("/nothing", {}, None, 404),
        ("/health", {}, None, 405),
    ],
)
def test_refusals(served: FakeServed, path: str, body: Any, param: str | None, status: int) -> None:
    answer = served.post(path, body)
    if status == 200:
        assert answer[0] == 200
    else:
        refused(answer, status, param)


ODD = ["text", 5, -1.5, True, [], {}, [None], {"a": [1]}, [["x"]], "\u0000", 10**30]


@pytest.mark.parametrize(
    ("path", "model", "good"),
    [
        (COMPLETIONS, CompletionRequest, PROMPT),
        (CHAT, ChatRequest, HELLO),
        ("/tokenize", TokenizeRequest, {}),
        ("/detokenize", DetokenizeRequest, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_type_of_any_field_fails_the_server(served: FakeServed, path: str, model: Any, good: Any) -> None:
    connection = served.connect()
    for field, value in itertools.product(model.model_fields, ODD):
        connection.request("POST", path, json.dumps(good | {field: value}), JSON)
        answer = connection.getresponse()
        raw = answer.read()
        assert answer.status in (200, 400, 404), (field, value, raw)
        if answer.status != 200:
            assert parsed(raw)["error"]["param"] is not None, (field, value, raw)
    connection.close()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_of_known_fields_fails_the_server(shared: FakeServed, data: st.DataObject) -> None:
    path, model, good = data.draw(
        st.sampled_from([(COMPLETIONS, CompletionRequest, PROMPT), (CHAT, ChatRequest, HELLO)])
    )
    fields = st.sampled_from([*model.model_fields, *UNSUPPORTED])
    body = good | data.draw(st.dictionaries(fields, ANYTHING, max_size=4))
    if body.get("stream"):
        body["stream"] = False
    assert shared.post(path, body)[0] in (200, 400, 404), body


def test_r126_without_a_template_text_is_continued_and_chat_is_refused(served: FakeServed) -> None:
    tokenizer = served.llm.get_tokenizer()
    kept, tokenizer._templates = tokenizer._templates, {}
    template = tokenizer.template()
    templates, template.templates = template.templates, {}
    try:
        assert "--chat-template" in refused(served.post(CHAT, HELLO), 400, "chat_template")
        assert served.post(COMPLETIONS, PROMPT)[0] == 200
    finally:
        template.templates, tokenizer._templates = templates, kept


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": NaN}',
        b"[" * 50_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"\x00\x01\x02",
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"' + b"x" * 50_000 + b'": 1}',
        b'{"prompt": "a", "a\\nb": 1}',
        b'{"prompt": "a", "n": ' + b"[" * 400 + b"]" * 400 + b"}",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_malformed_bodies(served: FakeServed, raw: bytes) -> None:
    status, answer = served.ask("POST", COMPLETIONS, raw)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"].splitlines()) == 1
    assert len(answer["error"]["message"]) < 800


@pytest.mark.parametrize("depth", [300, 900])
def test_deep_nesting_is_refused_wherever_it_stands(served: FakeServed, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    for fields in (
        f'"messages": [{{"role": "user", "content": "Hello", "more": {deep}}}]',
        f'"messages": [{{"role": "user", "content": "Hello"}}], "chat_template_kwargs": {deep}',
        f'"messages": [{{"role": "user", "content": "Hello"}}], "response_format": {{"type": "json_schema", '
        f'"json_schema": {{"schema": {deep}}}}}',
        f'"messages": {deep}',
    ):
        status, _ = served.ask("POST", CHAT, f'{{{fields}, "max_tokens": 1}}'.encode())
        assert status in (200, 400), fields[:80]


def test_bodies_that_are_too_large_together_are_told_to_come_again(served: FakeServed) -> None:
    body = json.dumps(PROMPT | {"prompt": "x"}).encode()
    padded = body[:-1] + b" " * (2**17 - len(body)) + b"}"
    with served.paused():
        held = [served.connect() for _ in range(7)]
        for connection in held:
            connection.request("POST", COMPLETIONS, padded, JSON)
        served.until(lambda: served.model.client.num_requests == 7)
        gate = served.gate
        assert gate._held_bytes == 7 * 2**17
        gate._held_bytes += 25 * 2**17  # as if 25 more were held
        assert "too large together" in refused(served.ask("POST", COMPLETIONS, padded), 429, None)
        gate._held_bytes -= 25 * 2**17
    for connection in held:
        assert connection.getresponse().status == 200
        connection.close()
    served.until(lambda: gate._held_bytes == 0)


def test_a_body_that_is_too_large_is_not_read(served: FakeServed) -> None:
    assert "131072" in refused(served.post(COMPLETIONS, {"prompt": "x" * 10_000_000}), 413, None)

    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            yield b"x" * 50_000

    connection = served.connect()
    connection.request("POST", COMPLETIONS, pieces(), JSON, encode_chunked=True)
    answer = connection.getresponse()
    refused((answer.status, parsed(answer.read())), 413, None)
    connection.close()


def test_the_body_must_say_that_it_is_json(served: FakeServed) -> None:
    connection = served.connect()
    connection.request("POST", COMPLETIONS, json.dumps(PROMPT), {"content-type": "text/plain"})
    answer = connection.getresponse()
    assert "Content-Type" in refused((answer.status, parsed(answer.read())), 415, None)
    connection.close()


# -- connections ------------------------------------------------------------------------------------------------------


def wait_for_end(plug: socket.socket) -> bytes:
    """All that still comes until the server closes the connection."""
    plug.settimeout(LIMIT_S)
    got = b""
    try:
        while piece := plug.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize("begin", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_client_that_dribbles_its_headers_is_cut_off(served: FakeServed, begin: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as plug:
        plug.sendall(begin)
        deadline = time.monotonic() + LIMIT_S
        with contextlib.suppress(OSError):
            while begin:
                assert time.monotonic() < deadline
                plug.sendall(b"x")
                time.sleep(0.05)
        assert wait_for_end(plug) == b""


def test_after_an_answer_too(served: FakeServed) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as plug:
        plug.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += plug.recv(65536)
        plug.sendall(b"GET /hea")
        assert wait_for_end(plug) == b""


def test_a_body_that_does_not_come_is_not_waited_for(served: FakeServed) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as plug:
        plug.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = wait_for_end(plug)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not come within 0.4 s" in answer


def test_an_answer_that_nobody_reads_is_given_up(served: FakeServed) -> None:
    def endless(request: EngineRequest) -> list[int]:
        request.max_tokens = 10**9
        return []

    served.group.script = endless
    try:
        with socket.create_connection(("127.0.0.1", served.port)) as plug:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            prompts = json.dumps({"prompt": ["a"] * 8, "n": 8, "stream": True, "logprobs": 20, "ignore_eos": True})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            plug.sendall(f"{head}Content-Length: {len(prompts)}\r\n\r\n{prompts}".encode())
            served.until(lambda: not served.is_idle())
            served.until(served.is_idle)  # nothing but aborts ends them
    finally:
        served.group.script = lambda request: served.token_ids


def test_a_thousand_half_open_connections_disturb_nobody(served: FakeServed) -> None:
    plugs = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(1000)]
    try:
        for plug in plugs[::2]:
            plug.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert served.post(COMPLETIONS, PROMPT)[0] == 200
        for plug in plugs:
            assert wait_for_end(plug) == b""
    finally:
        for plug in plugs:
            plug.close()


def test_more_requests_than_the_limit_are_told_to_come_again(served: FakeServed) -> None:
    with served.paused():
        held = [served.connect() for _ in range(8)]
        for connection in held:
            connection.request("POST", COMPLETIONS, json.dumps(PROMPT), JSON)
        served.until(lambda: served.model.client.num_requests == 8)
        assert "8 requests" in refused(served.post(COMPLETIONS, PROMPT), 429, None)
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            assert served.ask(method, path)[0] == 200
        assert served.post("/abort", {"request_id": "none"}) == (200, {"aborted": []})
        assert refused(served.post("/abort", {"request_id": "x" * LIMITS.max_body_bytes}), 413, None)
    for connection in held:
        assert connection.getresponse().status == 200
        connection.close()


# -- who leaves, who is thrown out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_goes_is_aborted(served: FakeServed, stream: bool, path: str) -> None:
    with served.paused():
        connection = served.connect()
        body = (PROMPT if path == COMPLETIONS else HELLO) | {"stream": stream, "n": 3}
        connection.request("POST", path, json.dumps(body), JSON | {"x-data-parallel-rank": "1"})
        served.until(lambda: served.llm.client.num_requests_per_rank() == [0, 3])
        served.step()
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        connection.close()
        served.until(served.is_idle)  # although no step was taken since


@pytest.mark.parametrize("by_id", [False, True])
def test_abort_ends_with_what_there_is(served: FakeServed, by_id: bool) -> None:
    with served.paused():
        connection = served.connect()
        body = json.dumps({"prompt": ["Hello", "there"], "max_tokens": 9})
        connection.request("POST", COMPLETIONS, body, JSON | {"x-request-id": "mine"})
        served.until(lambda: served.model.client.num_requests == 2)
        refused(served.post(COMPLETIONS, PROMPT, x_request_id="mine"), 400, "request_id")
        served.step()
        asked = {"request_id": "cmpl-mine"} if by_id else {"abort_all": True}
        assert served.post("/abort", asked) == (200, {"aborted": ["cmpl-mine", "cmpl-mine-1"]})
        answer = connection.getresponse()
        choices = parsed(answer.read())["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        assert answer.headers["x-request-id"] == "cmpl-mine"
        assert served.post("/abort", asked) == (200, {"aborted": []})
        connection.close()


def test_an_answer_is_aborted_after_its_first_prompt_has_ended(served: FakeServed) -> None:
    served.group.script = lambda request: [] if request.request_id == "cmpl-two" else served.token_ids
    with served.paused():
        connection = served.connect()
        body = json.dumps({"prompt": ["Hello", "there"], "max_tokens": 9})
        connection.request("POST", COMPLETIONS, body, JSON | {"x-request-id": "two"})
        served.until(lambda: served.model.client.num_requests == 2)
        served.step()
        assert served.post("/abort", {"request_id": "cmpl-two"}) == (200, {"aborted": ["cmpl-two-1"]})
        choices = parsed(connection.getresponse().read())["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "abort"]
        connection.close()
    served.group.script = lambda request: served.token_ids


def test_wrong_headers_are_named(served: FakeServed) -> None:
    for name, value in (("X-Request-Id", "a b"), ("X-Data-Parallel-Rank", "-1"), ("X-Request-Id", "x" * 200)):
        refused(served.post(COMPLETIONS, PROMPT, **{name: value}), 400, name)
    refused(served.post(COMPLETIONS, PROMPT, x_data_parallel_rank="2"), 400, "data_parallel_rank")


def test_a_failed_step_is_an_error_of_its_requests(served: FakeServed) -> None:
    with served.paused():
        whole, streamed = served.connect(), served.connect()
        whole.request("POST", COMPLETIONS, json.dumps(PROMPT), JSON)
        streamed.request("POST", CHAT, json.dumps(HELLO | {"stream": True}), JSON)
        served.until(lambda: served.model.client.num_requests == 2)
        served.on_loop(lambda: served.group.fail_step("step 7 failed"))
        answer = whole.getresponse()
        assert "step 7 failed" in refused((answer.status, parsed(answer.read())), 500, None)
        (event,) = events(streamed.getresponse().read())
        assert "step 7 failed" in event["error"]["message"]
        whole.close()
        streamed.close()


def test_r043_a_lost_rank_is_told_to_all_and_health_says_why() -> None:
    with serving() as served:
        served.text = "some words"
        with served.paused():
            connection = served.connect()
            connection.request("POST", COMPLETIONS, json.dumps(PROMPT), JSON)
            served.until(lambda: served.model.client.num_requests == 1)
            served.on_loop(lambda: served.group.lose("rank 1 ended unexpectedly"))
            answer = connection.getresponse()
            assert "rank 1 ended" in refused((answer.status, parsed(answer.read())), 500, None)
            connection.close()
            status, health = served.ask("GET", "/health")
            assert status == 503
            assert health["reason"] == "RankLost: rank 1 ended unexpectedly"
            assert "rank 1 ended" in refused(served.post(COMPLETIONS, PROMPT), 503, None)
            assert [str(error) for error in served.ended] == ["rank 1 ended unexpectedly"]


# -- keys, names, origins ---------------------------------------------------------------------------------------------


def test_keys_names_and_origins() -> None:
    settings = Settings(
        port=0, api_keys=("one", "two\n"), served_model_names=("mine", "also"), allowed_origins=("https://a.example",)
    )
    with serving(settings) as served:
        served.text = "some words"
        for wrong in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}, {"authorization": "Basic one"}):
            status, answer = served.post(COMPLETIONS, PROMPT, **wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert served.ask("GET", "/v1/models", **wrong)[0] == 401
        assert served.ask("GET", "/health")[0] == 200
        assert served.post("/abort", {"abort_all": True})[0] == 401
        for key in ("one", "two"):
            status, answer = served.post(COMPLETIONS, PROMPT | {"model": "also"}, authorization=f"Bearer {key}")
            assert (status, answer["model"]) == (200, "also")
        refused(served.post(COMPLETIONS, PROMPT | {"model": "tiny"}, authorization="Bearer one"), 404, "model")
        _, models = served.ask("GET", "/v1/models", authorization="Bearer one")
        assert [card["id"] for card in models["data"]] == ["mine", "also"]
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            connection = served.connect()
            connection.request("GET", "/health", headers={"origin": origin})
            answer = connection.getresponse()
            answer.read()
            assert answer.headers["access-control-allow-origin"] == allowed
            connection.close()


def test_no_origin_is_let_in_unasked(served: FakeServed) -> None:
    connection = served.connect()
    connection.request("GET", "/health", headers={"origin": "https://a.example"})
    answer = connection.getresponse()
    answer.read()
    assert answer.headers["access-control-allow-origin"] is None
    connection.close()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"api_keys": ("",)}, "api_key"),
        ({"on_rank_loss": "wait"}, "on_rank_loss"),
        ({"ssl_certfile": __file__}, "ssl_certfile"),
        ({"ssl_certfile": __file__, "ssl_keyfile": "no/such/file"}, "ssl_keyfile"),
        ({"ssl_certfile": __file__, "ssl_keyfile": __file__}, "ssl_certfile"),
        ({"ssl_ca_certs": __file__}, "ssl_ca_certs"),
        ({"header_timeout_s": float("nan")}, "header_timeout_s"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s"),
        ({"send_timeout_s": -1.0}, "send_timeout_s"),
        ({"profile_dir": __file__}, "profile_dir"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**given)
    assert caught.value.field == field


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """Of an authority that is its own; as settings."""
    files = {"ssl_certfile": str(tmp_path / "certificate.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]]
    subprocess.run([*make, *names], check=True, capture_output=True, timeout=LIMIT_S)
    return files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_an_authority_only_its_clients_are_let_in(certificate: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        Settings(**certificate, ssl_ca_certs=__file__)

    def status(port: int, client: ssl.SSLContext) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=LIMIT_S, context=client)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status

    with serving(Settings(port=0, **certificate, ssl_ca_certs=certificate["ssl_certfile"])) as served:
        client = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status(served.port, client)
        client.load_cert_chain(certificate["ssl_certfile"], certificate["ssl_keyfile"])
        assert status(served.port, client) == 200
