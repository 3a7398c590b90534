"""/metrics of a real server: under load, behind a key, under vLLM's names, and when ranks are lost."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
from gloo_groups import Groups
from metrics_text import Shown
from served import JSON, Served

from hocket.server.settings import Settings

COMPLETIONS = "/v1/completions"


def body(tokens: int) -> dict[str, Any]:
    return {"prompt": "In the beginning", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}


def scraped(served: Served, **headers: str) -> Shown:
    connection = served.connect()
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["content-type"] == served.model.metrics.content_type  # type: ignore[union-attr]
        return Shown(answer.read())
    finally:
        connection.close()


def test_r111_after_load_the_sum_over_the_ranks_is_what_was_sent(groups: Groups) -> None:
    """Also of what a client left: an abort. Scrapes in the midst of it disturb nobody."""
    with groups.llm("tiny", 2, skip_tokenizer_init=False, enable_dbo=True, dbo_decode_token_threshold=2) as llm:
        served = Served(llm, Settings(port=0))
        with ThreadPoolExecutor(8) as pool:
            sent = [
                pool.submit(served.post, COMPLETIONS, body(12), X_Data_Parallel_Rank=str(i % 3 % 2)) for i in range(9)
            ]
            during = [scraped(served) for _ in range(5)]
            assert [one.result()[0] for one in sent] == [200] * 9
        leaving = served.connect()
        leaving.request("POST", COMPLETIONS, '{"prompt": "He", "max_tokens": 900, "ignore_eos": true}', JSON)
        served.until(lambda: any(llm.client.num_requests_per_rank()))
        leaving.close()
        served.until(served.is_idle)
        shown = scraped(served)
        served.close()
    for one in (*during, shown):
        assert set(one.by_engine("hocket:request_success_total")) == {"0", "1"}
    assert shown.by_engine("hocket:request_success_total", finished_reason="length") == {"0": 6, "1": 3}
    assert sum(shown.by_engine("hocket:request_success_total", finished_reason="abort").values()) == 1
    assert shown.by_engine("hocket:e2e_request_latency_seconds_count") == {"0": 6, "1": 3}
    assert {sample.labels["model_name"] for sample in shown.samples} == {"tiny"}


def test_behind_a_key_and_under_the_names_of_vllm(groups: Groups) -> None:
    settings = Settings(port=0, api_keys=("secret",), metrics_names="vllm", served_model_names=("mine", "other"))
    with groups.llm("tiny", 2, skip_tokenizer_init=False) as llm:
        served = Served(llm, settings)
        assert served.ask("GET", "/metrics")[0] == 401
        shown = scraped(served, Authorization="Bearer secret")
        served.close()
    assert shown.by_engine("vllm:num_requests_running") == {"0": 0, "1": 0}
    assert shown.by_engine("hocket:steps_total", lambda values: len(values)) == {"0": 4, "1": 4}
    assert {sample.labels["model_name"] for sample in shown.samples} == {"mine"}


def test_when_a_rank_is_lost_its_requests_are_errors_and_metrics_stay(groups: Groups) -> None:
    with groups.llm("tiny", 2, skip_tokenizer_init=False) as llm:
        served = Served(llm, Settings(port=0))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.post, COMPLETIONS, body(900))
            served.until(lambda: any(llm.client.num_requests_per_rank()))
            os.kill(llm.client.group.pids[1], signal.SIGKILL)
            assert answer.result()[0] >= 500
        started = time.monotonic()
        shown = scraped(served)
        assert time.monotonic() - started < 10.0
        served.close()
    assert sum(shown.by_engine("hocket:request_success_total", finished_reason="error").values()) == 1
    assert not shown.values("hocket:num_requests_running"), "nobody can say that of ranks that are gone"
