"""Prompts and transformers' answers for the cells of the overlap grid, and the check of an engine against both.

Knows nothing of how cells are chosen.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB, Reference, hf_reference
from gloo_groups import Groups
from overlap_cells import (
    HEAD_LEN,
    NUM_RANKS,
    NUM_TOKENS,
    PREFIX_LEN,
    Ask,
    Case,
    Cell,
    asks_of,
    engine_options,
    expected,
    forced_split,
    overlap_options,
)
from torch import Tensor

from hocket.llm import LLM
from hocket.outputs import RequestOutput
from hocket.request import SamplingParams

TOP = 4
TOLERANCE = 1e-5
LEAST_MARGIN = 2e-5
"""Routing or greedy choices nearer than this to a tie are not asked for: rounding may decide them either way."""
Checkpoints = Callable[[str], Path]


@dataclass(frozen=True)
class Key:
    """Which prompt of a checkpoint: `length` tokens after the prefix all share (if `is_prefixed`), `head` first."""

    is_prefixed: bool
    head: int | None
    length: int
    number: int


@dataclass(frozen=True)
class Answer:
    """A prompt with transformers' NUM_TOKENS greedy tokens and their log-probabilities fp32 [NUM_TOKENS, V]."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: Tensor


class Answers:
    """One checkpoint's prompts, made when they are first asked for; each without near ties anywhere."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._found: dict[Key, Answer] = {}

    def of(self, keys: Iterable[Key]) -> dict[Key, Answer]:
        wanted = list(keys)
        self._find({Key(True, None, 0, 0) for key in wanted if key.is_prefixed})
        self._find({_head(key) for key in wanted if _has_head(key)})
        self._find(set(wanted))
        return {key: self._found[key] for key in wanted}

    def _find(self, keys: set[Key]) -> None:
        by_length: dict[int, list[Key]] = defaultdict(list)
        for key in sorted(keys - self._found.keys(), key=repr):
            by_length[key.length].append(key)
        for missing in by_length.values():
            for attempt in range(100):
                prompts = [self._prompt(key, attempt) for key in missing]
                tokens, logprobs, margins = self._reference.continue_all(prompts, NUM_TOKENS)
                for i, key in enumerate(missing):
                    if margins[i] > LEAST_MARGIN:
                        self._found[key] = Answer(prompts[i], tokens[i].tolist(), logprobs[i].clone())
                missing = [key for key in missing if key not in self._found]
                if not missing:
                    break
            else:
                raise AssertionError(f"no prompts without near ties: {missing}")

    def _prompt(self, key: Key, attempt: int) -> list[int]:
        start: list[int] = []
        length = key.length
        if key.length == 0:
            length = PREFIX_LEN
        elif _has_head(key):
            start = self._found[_head(key)].prompt
            length -= HEAD_LEN
        elif key.is_prefixed:
            start = self._found[Key(True, None, 0, 0)].prompt
        draw = random.Random(f"{key} {attempt}")
        return start + [draw.randrange(3, VOCAB) for _ in range(length)]


def _has_head(key: Key) -> bool:
    return key.head is not None and key.length > HEAD_LEN


def _head(key: Key) -> Key:
    return Key(key.is_prefixed, key.head, HEAD_LEN, -1)


def _key(ask: Ask, config: Cell) -> Key:
    shared = PREFIX_LEN if config["prefix"] else 0
    return Key(config["prefix"], ask.head, ask.num_cached + ask.num_new - shared, ask.number)


Plain = list[list[tuple[int, dict[int, float]]]]
"""By request and output position: the token, and the log-probabilities that were asked for."""


@dataclass
class Checker:
    """Runs cells on an engine and compares: with transformers, with an engine without overlap, and with what the steps
    must have been."""

    groups: Groups
    checkpoints: Checkpoints
    num_cells: int = 0
    _answers: dict[str, Answers] = field(default_factory=dict)
    _off: dict[tuple[Any, ...], Plain] = field(default_factory=dict)

    def check(self, config: Cell, cases: Iterable[Case]) -> None:
        """All `cases` on an engine of this configuration. Raises AssertionError with what is wrong first."""
        chosen = list(cases)
        self._run_without_overlap(config, chosen)
        with forced(config), self._llm(config, **overlap_options(config)) as llm:
            for case in chosen:
                self.check_case(llm, config, case)

    def check_case(self, llm: LLM, config: Cell, case: Case) -> None:
        """One (size, phase) on a running engine."""
        asks = asks_of(*case, config)
        results = self._generate(llm, config, asks)
        stats = llm.stats(reset=True)
        where = f"{config} {case}"
        self._check_answers(config, asks, results, where)
        _check_same(_plain(results), self._off[_off_key(config, case)], where)
        check_steps(stats, config, asks, where)
        self.num_cells += 1

    @contextmanager
    def _llm(self, config: Cell, **options: Any) -> Iterator[LLM]:
        path = self.checkpoints(config["checkpoint"])
        with self.groups.llm(path, NUM_RANKS, **engine_options(config), **options) as llm:
            self.warm_up(llm, config)
            yield llm

    def warm_up(self, llm: LLM, config: Cell) -> None:
        """Bring what all prompts share into every rank's prefix cache."""
        if config["prefix"]:
            key = Key(True, None, 0, 0)
            prompt = self.answers(config).of([key])[key].prompt
            one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            llm.generate([prompt] * NUM_RANKS, one, data_parallel_rank=list(range(NUM_RANKS)))
        llm.stats(reset=True)

    def answers(self, config: Cell) -> Answers:
        name = config["checkpoint"]
        if name not in self._answers:
            self._answers[name] = Answers(hf_reference(self.checkpoints(name)))
        return self._answers[name]

    def _run_without_overlap(self, config: Cell, cases: list[Case]) -> None:
        self.answers(config).of([_key(ask, config) for case in cases for ask in asks_of(*case, config)])
        missing = [case for case in cases if _off_key(config, case) not in self._off]
        if not missing:
            return
        off = {**config, "ubatches": 1, "threshold": "least"}
        with self._llm(off) as llm:
            for case in missing:
                asks = asks_of(*case, off)
                results = self._generate(llm, off, asks)
                self._check_answers(off, asks, results, f"without overlap: {off} {case}")
                check_steps(llm.stats(reset=True), off, asks, f"without overlap: {off} {case}")
                self._off[_off_key(config, case)] = _plain(results)

    def _generate(self, llm: LLM, config: Cell, asks: list[Ask]) -> list[RequestOutput]:
        answers = self.answers(config).of([_key(ask, config) for ask in asks])
        return llm.generate(
            [answers[_key(ask, config)].prompt for ask in asks],
            [
                SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=TOP)
                for ask in asks
            ],
            use_tqdm=False,
            data_parallel_rank=[ask.rank for ask in asks],
        )

    def _check_answers(self, config: Cell, asks: list[Ask], results: list[RequestOutput], where: str) -> None:
        answers = self.answers(config).of([_key(ask, config) for ask in asks])
        for ask, result in zip(asks, results, strict=True):
            answer, at = answers[_key(ask, config)], f"{where}: {ask}"
            assert result.outputs[0].token_ids == answer.token_ids[: ask.max_tokens], at
            assert result.num_cached_tokens == ask.num_cached, at
            for (_, ours), row in zip(_plain([result])[0], answer.logprobs, strict=False):
                assert len(ours) == TOP, at
                _check_close(ours, row, at)


def check_steps(stats: list[dict[str, Any]], config: Cell, asks: list[Ask], where: str) -> None:
    """Every step had the phase, the reason and the cut that it must have."""
    for rank, (found, wanted) in enumerate(zip(stats, expected(asks, config), strict=True)):
        overlap, at = found["overlap"], f"{where}: rank {rank}"
        assert {phase: n for phase, n in overlap["reasons"].items() if phase != "idle"} == wanted.reasons, at
        assert overlap["ubatch_tokens"] == wanted.ubatch_tokens, at
        assert found["steps"] == overlap["steps"] == wanted.num_steps, at
        assert sum(n for reasons in overlap["reasons"].values() for n in reasons.values()) == wanted.num_steps, at
        assert overlap["split"] == sum(wanted.ubatch_tokens.values()), at
        assert found["failed"] == 0, at


@contextmanager
def forced(config: Cell) -> Iterator[None]:
    """The environment of a configuration."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOCKET_FORCE_SPLIT", forced_split(config))
        yield


def _off_key(config: Cell, case: Case) -> tuple[Any, ...]:
    return (*(config[name] for name in ("checkpoint", "transport", "prefix", "chunk")), *case)


def _plain(results: list[RequestOutput]) -> Plain:
    found: Plain = []
    for result in results:
        completion = result.outputs[0]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        positions = zip(completion.token_ids, completion.logprobs, strict=True)
        found.append([(token, {other: value.logprob for other, value in row.items()}) for token, row in positions])
    return found


def _check_same(ours: Plain, theirs: Plain, where: str) -> None:
    """Overlap on against off."""
    for mine, other in zip(ours, theirs, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in other], where
        for (_, left), (_, right) in zip(mine, other, strict=True):
            common = left.keys() & right.keys()
            assert len(common) >= TOP - 1, where  # two tokens of the same probability may take the last place
            _check_close({token: left[token] for token in common}, right, where)


def _check_close(ours: Mapping[int, float], reference: Any, where: str) -> None:
    worst = 0.0
    for token_id, value in ours.items():
        difference = abs(value - float(reference[token_id]))
        worst = difference if not difference <= worst else worst  # NaN is the worst of all
    assert worst < TOLERANCE, f"log-probabilities differ by {worst}: {where}"
