"""The server over two real ranks, overlap off and on: the answers of `LLM`, and nothing left of those who go."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
from gloo_groups import Groups
from processes import held
from served import JSON, Served, events, parsed

from hocket.llm import LLM
from hocket.request import SamplingParams
from hocket.server.settings import Settings

COMPLETIONS = "/v1/completions"
CUT_OFF = 0
DUAL = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}
PROMPTS = ["In the beginning", "The lady was", "And it came to pass", "Emma", "It is a truth", "Of the sea", "He", "A"]
LIMITS = Settings(port=0, max_body_bytes=2**20, header_timeout_s=1.0)


@pytest.fixture(scope="module", params=[{}, DUAL], ids=["off", "dual"])
def shared(request: pytest.FixtureRequest, groups: Groups) -> Iterator[Served]:
    with groups.llm("tiny", 2, skip_tokenizer_init=False, **request.param) as llm:
        served = Served(llm, LIMITS)
        yield served
        served.close()


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    yield shared
    shared.until(shared.is_idle)
    nothing_runs(shared)
    assert not shared.ended


def nothing_runs(served: Served) -> None:
    """On the ranks: no request, no block that is not free. They learn of an abort a moment after the front."""
    for _ in range(200):
        stats = served.stats()
        if all(rank["num_running"] == rank["num_waiting"] == rank["kv_usage"] == 0 for rank in stats):
            return
    raise AssertionError(stats)


def greedy(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True} | more


def expected(llm: LLM, served: Served, prompts: list[str]) -> list[str]:
    """What LLM gives for the same; on the server's loop, while that has nothing to do."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return served.on_loop(lambda: [r.outputs[0].text for r in llm.generate(prompts, params, use_tqdm=False)])


def test_the_answers_are_those_of_llm(served: Served) -> None:
    texts = expected(served.llm, served, PROMPTS)
    before = served.stats()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        whole = list(pool.map(lambda p: served.post(COMPLETIONS, greedy(p)), PROMPTS))
        streamed = list(pool.map(lambda p: served.stream(COMPLETIONS, greedy(p)), PROMPTS))
    assert [answer["choices"][0]["text"] for _, answer in whole] == texts
    assert ["".join(chunk["choices"][0]["text"] for chunk in chunks) for chunks in streamed] == texts
    together = served.post(COMPLETIONS, greedy("") | {"prompt": PROMPTS})[1]
    assert [choice["text"] for choice in together["choices"]] == texts
    after = served.stats()
    if served.llm.config.overlap.num_ubatches > 1:
        assert all(rank["overlap"]["split"] > old["overlap"]["split"] for rank, old in zip(after, before, strict=True))
    else:
        assert all(rank["overlap"]["split"] == 0 for rank in after)


def test_r111_every_rank_counts_its_requests(served: Served) -> None:
    def value(name: str, rank: int, more: str = "") -> float:
        connection = served.connect()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        found = [line for line in lines if line.startswith(name) and f'engine="{rank}"' in line and more in line]
        return sum(float(line.split()[-1]) for line in found)

    name = "hocket:request_success_total"
    before = [value(name, rank) for rank in range(2)]
    assert served.post(COMPLETIONS, greedy("") | {"prompt": PROMPTS})[0] == 200
    assert [value(name, rank) - before[rank] for rank in range(2)] == [4, 4]
    split = value("hocket:overlap_steps_total", 0, 'reason="split"')
    assert (split > 0) == (served.llm.config.overlap.num_ubatches > 1)


def test_r010_logprobs_after_a_batch_are_finite(served: Served) -> None:
    together = greedy("", logprobs=5, echo=True) | {"prompt": PROMPTS}
    for body in (together, greedy("In the beginning", logprobs=5)):
        status, answer = served.post(COMPLETIONS, body)  # NaN would not be parsed
        assert status == 200
        for choice in answer["choices"]:
            values = [value for value in choice["logprobs"]["token_logprobs"] if value is not None]
            assert values
            assert all(math.isfinite(value) and value <= 0 for value in values)


def test_an_answer_is_json_of_its_schema_beside_others(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "Who was Emma?"}],
        "response_format": form,
        "temperature": 2.0,
        "max_tokens": 200,
        "n": 4,
        "seed": 1,
    }
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(served.post, COMPLETIONS, greedy("In the beginning"))
        chunks = served.stream("/v1/chat/completions", body)
        assert beside.result()[1]["choices"][0]["text"] == expected(served.llm, served, ["In the beginning"])[0]
    for index in range(4):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        person = json.loads("".join(delta.get("content", "") for delta in deltas))
        assert person.keys() == {"name", "old"}
        assert isinstance(person["old"], bool)
    _, answer = served.post(COMPLETIONS, greedy("Hello", ignore_eos=False, response_format={"type": "json_object"}))
    assert answer["choices"][0]["text"].lstrip().startswith("{")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_r121_a_client_that_goes_is_gone_within_two_steps(
    served: Served, stream: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its rank had computed when the front told it to stop, and what came of it: at most two steps more (one that
    ran, one that was held back until the ranks' next exchange)."""
    other = greedy("The lady was", max_tokens=24)
    expected_other = served.post(COMPLETIONS, other)[1]["choices"][0]["text"]
    before = [r["generated_tokens"] for r in served.stats()]
    told: list[int] = []
    client = served.model.client
    abort = client._tell_abort

    def noted(request_ids: Any) -> None:
        outputs = [client.client.processor.output_of(request_id) for request_id in request_ids]
        told.extend(len(output.outputs[0].token_ids) for output in outputs if output)
        abort(request_ids)

    monkeypatch.setattr(client, "_tell_abort", noted)
    going, staying = served.connect(), served.connect()
    going.request(
        "POST",
        COMPLETIONS,
        json.dumps(greedy("In the beginning", max_tokens=900, stream=stream)),
        JSON | {"x-data-parallel-rank": str(rank)},
    )
    served.until(lambda: client.num_requests == 1)
    staying.request("POST", COMPLETIONS, json.dumps(other), JSON | {"x-data-parallel-rank": str(1 - rank)})
    if stream:
        assert going.getresponse().readline().startswith(b"data: ")
    else:
        output = client.client.processor.output_of(next(iter(client._results)))
        served.until(lambda: bool(output and output.outputs[0].token_ids))
    going.close()
    assert parsed(staying.getresponse().read())["choices"][0]["text"] == expected_other
    staying.close()
    served.until(served.is_idle)
    nothing_runs(served)
    computed = served.stats()[rank]["generated_tokens"] - before[rank]
    (known,) = told
    assert 0 < known <= computed <= known + 2


def test_hostile_requests_beside_a_good_one(served: Served) -> None:
    text = expected(served.llm, served, ["In the beginning"])[0]
    bad: list[Any] = [
        b"{",
        b'{"prompt": "\xff"}',
        {"prompt": "x" * 10_000_000},
        {"prompt": "word " * 100_000},
        {"prompt": "a", "temperature": float("nan")},
        {"prompt": "a", "n": 10**9},
        {"prompt": [[5] * 2000] * 50},
    ]
    done = threading.Event()

    def attack(body: Any) -> list[int]:
        statuses = []
        while not done.is_set():
            try:
                statuses.append(served.post(COMPLETIONS, body)[0])
            except ConnectionError:  # it was cut off while it still sent its body
                statuses.append(CUT_OFF)
        return statuses

    with ThreadPoolExecutor(len(bad)) as pool:
        attacks = [pool.submit(attack, body) for body in bad]
        try:
            for _ in range(3):
                chunks = served.stream(COMPLETIONS, greedy("In the beginning"))
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        finally:
            done.set()
        for body, statuses in zip(bad, attacks, strict=True):
            assert set(statuses.result()) <= {400, 413, CUT_OFF}, str(body)[:50]


def test_many_clients_of_which_some_go_leave_nothing(served: Served) -> None:
    def client(number: int) -> str:
        draw = random.Random(number)
        body = greedy(PROMPTS[number % len(PROMPTS)], stream=True, max_tokens=draw.randrange(1, 30))
        connection = served.connect()
        connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
        answer = connection.getresponse()
        assert answer.status == 200
        if draw.random() < 0.4:
            for _ in range(draw.randrange(4)):
                answer.readline()
            connection.close()
            return "gone"
        chunks = events(answer.read())
        connection.close()
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return "answered"

    def wave(numbers: range) -> list[str]:
        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(client, numbers))
        served.until(lambda: served.is_idle() and not served._server.server_state.connections)
        nothing_runs(served)
        return outcomes

    wave(range(16))
    before = held()
    outcomes = wave(range(16, 64))
    assert {"gone", "answered"} == set(outcomes)
    assert held() == before
