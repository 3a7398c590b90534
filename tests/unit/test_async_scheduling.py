"""A step is scheduled and launched before the one before it is known on the host: the same tokens come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make
from in_process import group_of, in_process_llm

from hocket.llm import LLM
from hocket.request import SamplingParams

PROMPTS = [[5 + i, 6, 7 + i, *range(3, 3 + i)] for i in range(6)]


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]


def kinds() -> dict[str, Any]:
    """Parameters by name; `history`: the next token cannot be sampled before the last one is known."""
    plain = {"max_tokens": 12, "ignore_eos": True}
    return {
        "greedy": SamplingParams(temperature=0, **plain),
        "random": [SamplingParams(temperature=0.9, top_k=20, seed=i, **plain) for i in range(6)],
        "history": SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, **plain),
        "logprobs": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, **plain),
        "mixed": [SamplingParams(temperature=0.8, seed=i, frequency_penalty=0.5 * (i % 2), **plain) for i in range(6)],
        "lengths": [SamplingParams(temperature=0, max_tokens=1 + 2 * i, ignore_eos=True) for i in range(6)],
    }


@pytest.mark.parametrize("kind", list(kinds()))
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}])
def test_same_tokens(checkpoints: Path, kind: str, limits: dict[str, Any]) -> None:
    found = []
    for ahead in (False, True):
        with in_process_llm(make("v3", checkpoints), async_scheduling=ahead, **limits) as llm:
            engine = group_of(llm).engine
            waited = []
            finish = engine.runner.finish
            engine.runner.finish = lambda step, f=finish, w=waited: (w.append(step.can_wait), f(step))[1]
            found.append(tokens(llm, kinds()[kind]))
            if kind != "mixed":  # there it depends on who shares a step
                assert any(waited) is (ahead and kind not in ("history", "logprobs"))
            assert not engine.has_work
    assert found[0] == found[1]


def test_a_stop_token_ends_a_request_that_was_scheduled_once_more(checkpoints: Path) -> None:
    found = []
    for ahead in (False, True):
        with in_process_llm(make("v3", checkpoints), async_scheduling=ahead) as llm:
            all_ids = tokens(llm, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            stops = [SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[ids[5]]) for ids in all_ids]
            found.append(tokens(llm, stops))
            assert all(len(ids) <= 6 for ids in found[-1])
            assert llm.stats()[0]["kv_usage"] == 0.0
    assert found[0] == found[1]


def test_aborted_while_its_step_runs(checkpoints: Path) -> None:
    with in_process_llm(make("v3", checkpoints), async_scheduling=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = tokens(llm, params)
        llm.client.add_many([(str(i), prompt, params, 0) for i, prompt in enumerate(PROMPTS)])
        for _ in range(4):
            llm.client.poll(1.0)
        llm.client.abort(["1", "4"])
        done: dict[str, list[int]] = {}
        while llm.client.has_unfinished:
            done |= {r.request_id: r.outputs[0].token_ids for r in llm.client.poll(1.0) if r.finished}
        assert {k: v for k, v in done.items() if k not in ("1", "4")} == {
            str(i): ids for i, ids in enumerate(expected) if i not in (1, 4)
        }
        assert tokens(llm, params) == expected
