"""A step is scheduled and launched before the one before it is known on the host: the same tokens come out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make
from in_process import group_of, in_process_llm

from hocket.engine import Engine
from hocket.errors import HocketError, UBatchFailed
from hocket.llm import LLM
from hocket.outputs import TokenOutput
from hocket.overlap.failure import FailedStage
from hocket.overlap.vote import Row
from hocket.request import EngineRequest, SamplingParams
from hocket.trace.spans import Stage
from hocket.worker.in_flight import InFlight

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


def engine_request(name: str, **params: Any) -> EngineRequest:
    values = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **params)
    return EngineRequest(name, [5, 6, 7], values, max_tokens=12)


class OneOther:
    """An exchange with a rank that has nothing to do, and says once, if asked, that its last step failed."""

    fails = False

    def exchange(self, column: list[int]) -> list[list[int]]:
        other = list(column)
        idle = {Row.TOKENS: 0, Row.REQUESTS: 0, Row.UNIFORM_QUERY: 0, Row.MAX_QUERY: -1, Row.MAY_SPLIT: 1}
        for row, value in idle.items():
            other[row] = value
        other[Row.ABORT] = FailedStage(0, 0, Stage.QKV).code if self.fails else 0
        self.fails = False
        return [list(column), other]

    def close(self) -> None: ...


@torch.inference_mode()
def run(engine: Engine, requests: list[EngineRequest]) -> Iterator[tuple[list[TokenOutput], list[str]]]:
    """Each step's outputs and the requests that failed."""
    engine.add(requests)
    for _ in range(40):
        outputs, _ = engine.step()
        failure = engine.take_failure()
        yield outputs, failure.request_ids if failure else []


def ids_and_end(steps: Iterable[tuple[list[TokenOutput], list[str]]]) -> tuple[list[int], str | None]:
    outputs = [output for found, _ in steps for output in found]
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason if outputs else None


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_has_ended_does_not_fail_with_its_extra_row(checkpoints: Path, ahead: bool) -> None:
    with in_process_llm(make("v3", checkpoints), async_scheduling=ahead) as llm:
        engine = group_of(llm).engine
        other = OneOther()
        engine.exchange, engine._lock_step = other, True  # type: ignore[assignment]
        ids, _ = ids_and_end(run(engine, [engine_request("first")]))
        stop, at = ids[4], ids.index(ids[4])
        engine.stats.reset()
        requests = [engine_request("stops", stop_token_ids=[stop]), engine_request("goes on")]
        ended: list[str] = []
        for step, (outputs, failed) in enumerate(run(engine, requests)):
            ended += [output.request_id for output in outputs if output.finish_reason]
            if "stops" in ended and step <= at + 2:
                other.fails = True
            assert "stops" not in failed
        assert ended.count("stops") == 1
        assert engine.stats.snapshot()["requests_finished"]["stop"] == 1
        assert sum(engine.stats.snapshot()["requests_finished"].values()) == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_token_that_is_sampled_already_outlives_a_failing_launch(checkpoints: Path, ahead: bool) -> None:
    with in_process_llm(make("v3", checkpoints), async_scheduling=ahead) as llm:
        engine = group_of(llm).engine
        ids, _ = ids_and_end(run(engine, [engine_request("first")]))
        stop, at = ids[4], ids.index(ids[4])
        launch, calls = engine.runner.launch, iter(range(100))

        def fail_after_the_stop(*args: Any) -> InFlight:
            if next(calls) == at + 1:
                error = UBatchFailed("planted")
                error.code = 1
                raise error
            return launch(*args)

        engine.runner.launch = fail_after_the_stop  # type: ignore[method-assign]
        steps = list(run(engine, [engine_request("stops", stop_token_ids=[stop])]))
        assert ids_and_end(steps) == (ids[: at + 1], "stop")
        assert not any(failed for _, failed in steps)


@pytest.mark.parametrize("ahead", [False, True])
def test_logits_that_are_not_finite_are_named_before_anything_else(checkpoints: Path, ahead: bool) -> None:
    with in_process_llm(make("v3", checkpoints), async_scheduling=ahead) as llm:
        engine = group_of(llm).engine
        compute_logits, calls = engine.runner.model.compute_logits, iter(range(100))
        engine.runner.model.compute_logits = lambda hidden: (  # type: ignore[method-assign]
            compute_logits(hidden) * (float("nan") if next(calls) == 3 else 1.0)
        )
        with pytest.raises(HocketError, match="the logits of request 'odd' are not finite"):
            list(run(engine, [engine_request("odd")]))
        assert engine.take_failure() is None
