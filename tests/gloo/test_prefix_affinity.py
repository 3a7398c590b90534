"""A server over two real ranks: a long prefix is found again in the cache of the rank that computed it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
from gloo_groups import Groups
from metrics_text import Shown
from served import Served

from hocket.server.settings import Settings

COMPLETIONS = "/v1/completions"
LENGTH, MORE = 200, 30
KNOWN = 192
"""Of the first LENGTH tokens: whole chunks of 64."""


@pytest.fixture(params=[True, False], ids=["by prefix", "not"])
def served(request: pytest.FixtureRequest, groups: Groups) -> Iterator[Served]:
    overlap = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}
    with groups.llm("tiny", 2, skip_tokenizer_init=False, **overlap) as llm:
        served = Served(llm, Settings(port=0, prefix_affinity=request.param))
        yield served
        served.until(served.is_idle)
        served.close()


def tokens(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=num_tokens)


def body(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def hits(served: Served) -> list[int]:
    return [rank["num_prefix_hits"] for rank in served.stats()]


def expected_hits(served: Served) -> float:
    connection = served.connect()
    connection.request("GET", "/metrics")
    shown = Shown(connection.getresponse().read())
    connection.close()
    return sum(shown.by_engine("hocket:known_prompt_tokens_total").values())


def test_a_long_prefix_is_found_where_it_was_computed(served: Served) -> None:
    """Two conversations begin together, one on each rank, so that the second one's is not the first idle one."""
    first, second = tokens(1, LENGTH), tokens(2, LENGTH)
    assert served.post(COMPLETIONS, body([first, second]))[0] == 200
    assert hits(served) == [0, 0]
    for turn in range(1, 4):
        for conversation in (first, second):
            conversation += tokens(10 * turn, MORE)
        found = [served.post(COMPLETIONS, body(second))[1]["usage"], served.post(COMPLETIONS, body(first))[1]["usage"]]
        if served.model._prefix_affinity:
            assert all(usage["prompt_tokens_details"]["cached_tokens"] >= KNOWN for usage in found)
    if served.model._prefix_affinity:
        assert all(rank >= 3 * KNOWN for rank in hits(served))
        assert 6 * KNOWN <= expected_hits(served) <= sum(hits(served))
    else:  # both go to rank 0, which is the first of two that have nothing to do
        assert hits(served)[1] == 0
        assert expected_hits(served) == 0
