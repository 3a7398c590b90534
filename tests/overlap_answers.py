"""Prompts and transformers' answers for the cells of the overlap grid, and the check of an engine against both.

Knows nothing of how cells are chosen.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB, Reference, hf_reference
from gloo_groups import STEP_TIMEOUT_S, Groups
from overlap_cells import (
    HEAD_LEN,
    NUM_TOKENS,
    PREFIX_LEN,
    Ask,
    Case,
    Expected,
    asks_of,
    engine_options,
    expected,
    forced_split,
    overlap_options,
    ranks_of,
)
from pairwise import Cell
from torch import Tensor

from hocket.llm import LLM
from hocket.outputs import RequestOutput
from hocket.request import SamplingParams

TOP = 4
TOLERANCE = 1e-5
LEAST_MARGIN = 1e-5
"""Routing or greedy choices nearer than this to a tie are not asked for: rounding may decide them either way."""
Checkpoints = Callable[[str], Path]


@dataclass(frozen=True)
class Key:
    """Which prompt of a checkpoint: `length` tokens after the prefix all share (if `is_prefixed`), `head` first."""

    is_prefixed: bool
    head: int | None
    length: int
    number: int


_PREFIX = Key(True, None, 0, 0)


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
        self._find({_PREFIX for key in wanted if key.is_prefixed})
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
            start = self._found[_PREFIX].prompt
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


class WrongAnswer(AssertionError):
    """Other tokens or log-probabilities than transformers, or than without overlap."""


class WrongSteps(AssertionError):
    """Steps split, or cut, other than they must be."""


@dataclass
class Checker:
    """Runs cells on an engine and compares: with transformers, with an engine without overlap, and with what the steps
    must have been."""

    groups: Groups
    checkpoints: Checkpoints
    step_timeout: float = STEP_TIMEOUT_S
    num_cells: int = 0
    _answers: dict[str, Answers] = field(default_factory=dict)
    _off: dict[tuple[Any, ...], Plain] = field(default_factory=dict)

    def check(self, config: Cell, cases: Iterable[Case]) -> None:
        """All `cases` on an engine of this configuration.

        Raises:
            WrongAnswer, WrongSteps: what is wrong first, and where.
        """
        chosen = list(cases)
        self.run_without_overlap(config, chosen)
        with self._llm(config) as llm:
            for case in chosen:
                stats = self._check_case(llm, config, case)
                check_steps(stats, config, asks_of(*case, config), f"{config} {case}")
                self.num_cells += 1

    def check_answers(self, config: Cell, cases: Iterable[Case]) -> list[list[dict[str, Any]]]:
        """As `check`, but how steps were split is not looked at: each case's counters of all ranks."""
        chosen = list(cases)
        self.run_without_overlap(config, chosen)
        with self._llm(config) as llm:
            return [self._check_case(llm, config, case) for case in chosen]

    def run_without_overlap(self, config: Cell, cases: Iterable[Case]) -> None:
        """Make what `check` compares with, where it is not there yet."""
        self._answers_of(config, [ask for case in cases for ask in asks_of(*case, config)])
        missing = [case for case in cases if _off_key(config, case) not in self._off]
        if not missing:
            return
        off = {**config, "ubatches": 1, "executor": "greenlet", "threshold": "least"}
        with self._llm(off, asks_for_overlap=False) as llm:
            for case in missing:
                asks, where = asks_of(*case, off), f"without overlap: {off} {case}"
                results = self._generate(llm, off, asks)
                self._compare_with_transformers(off, asks, results, where)
                check_steps(llm.stats(reset=True), off, asks, where)
                self._off[_off_key(config, case)] = _plain(results)

    def _check_case(self, llm: LLM, config: Cell, case: Case) -> list[dict[str, Any]]:
        asks, where = asks_of(*case, config), f"{config} {case}"
        results = self._generate(llm, config, asks)
        self._compare_with_transformers(config, asks, results, where)
        _compare(_plain(results), self._off[_off_key(config, case)], f"other than without overlap: {where}")
        return llm.stats(reset=True)

    @contextmanager
    def _llm(self, config: Cell, asks_for_overlap: bool = True) -> Iterator[LLM]:
        path, options = self.checkpoints(config["checkpoint"]), engine_options(config)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("HOCKET_FORCE_SPLIT", forced_split(config))
            if asks_for_overlap:
                options |= overlap_options(config)
            with self.groups.llm(path, ranks_of(config), step_timeout=self.step_timeout, **options) as llm:
                self._fill_cache(llm, config)
                yield llm

    def _fill_cache(self, llm: LLM, config: Cell) -> None:
        """Bring what all prompts share into every rank's prefix cache."""
        if config["prefix"]:
            prompt = self._of(config).of([_PREFIX])[_PREFIX].prompt
            ranks = range(ranks_of(config))
            one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            llm.generate([prompt for _ in ranks], one, data_parallel_rank=list(ranks), use_tqdm=False)
        llm.stats(reset=True)

    def _of(self, config: Cell) -> Answers:
        name = config["checkpoint"]
        if name not in self._answers:
            self._answers[name] = Answers(hf_reference(self.checkpoints(name)))
        return self._answers[name]

    def _answers_of(self, config: Cell, asks: list[Ask]) -> list[Answer]:
        keys = [_key(ask, config) for ask in asks]
        found = self._of(config).of(keys)
        return [found[key] for key in keys]

    def _generate(self, llm: LLM, config: Cell, asks: list[Ask]) -> list[RequestOutput]:
        return llm.generate(
            [answer.prompt for answer in self._answers_of(config, asks)],
            [SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=TOP) for ask in asks],
            use_tqdm=False,
            data_parallel_rank=[ask.rank for ask in asks],
        )

    def _compare_with_transformers(
        self, config: Cell, asks: list[Ask], results: list[RequestOutput], where: str
    ) -> None:
        for ask, answer, result in zip(asks, self._answers_of(config, asks), results, strict=True):
            theirs = list(zip(answer.token_ids, answer.logprobs, strict=True))[: ask.max_tokens]
            _compare(_plain([result]), [theirs], f"other than transformers: {ask} of {where}")
            if result.num_cached_tokens != ask.num_cached:
                raise WrongSteps(f"{result.num_cached_tokens} tokens were cached: {ask} of {where}")


def check_steps(stats: list[dict[str, Any]], config: Cell, asks: list[Ask], where: str) -> None:
    """Every step had the phase, the reason and the cut that it must have. Raises WrongSteps."""
    for rank, (counters, wanted) in enumerate(zip(stats, expected(asks, config), strict=True)):
        overlap = counters["overlap"]
        working = {phase: reasons for phase, reasons in overlap["reasons"].items() if phase != "idle"}
        found = Expected(overlap["steps"], working, overlap["ubatch_tokens"])
        if found != wanted:
            raise WrongSteps(f"{found} instead of {wanted}: rank {rank} in {where}")
        counted = sum(n for reasons in overlap["reasons"].values() for n in reasons.values())
        num_split = sum(wanted.ubatch_tokens.values())
        if (counters["steps"], counted, overlap["split"]) != (wanted.num_steps, wanted.num_steps, num_split):
            raise WrongSteps(f"counters do not add up: {counters} of rank {rank} in {where}")
        if counters["failed"]:
            raise WrongSteps(f"{counters['failed']} steps failed on rank {rank} in {where}")


def _off_key(config: Cell, case: Case) -> tuple[Any, ...]:
    return (*(config[name] for name in ("checkpoint", "transport", "prefix", "chunk")), *case)


def _plain(results: list[RequestOutput]) -> Plain:
    found: Plain = []
    for result in results:
        completion = result.outputs[0]
        assert completion.logprobs is not None
        positions = zip(completion.token_ids, completion.logprobs, strict=True)
        found.append([(token, {other: value.logprob for other, value in row.items()}) for token, row in positions])
    return found


def _compare(ours: Plain, theirs: Sequence[Sequence[tuple[int, Any]]], where: str) -> None:
    """The same tokens, and log-probabilities within TOLERANCE where both have them. Raises WrongAnswer."""
    for mine, other in zip(ours, theirs, strict=True):
        tokens = [token for token, _ in mine], [token for token, _ in other]
        if tokens[0] != tokens[1]:
            raise WrongAnswer(f"tokens {tokens[0]} instead of {tokens[1]}: {where}")
        for (_, left), (_, right) in zip(mine, other, strict=True):
            # Two tokens of nearly the same probability may take the last place.
            common = [token for token in left if not isinstance(right, dict) or token in right]
            if len(left) != TOP or len(common) < TOP - 1:
                raise WrongAnswer(f"log-probabilities of {list(left)}: {where}")
            for token in common:
                difference = abs(left[token] - float(right[token]))
                if not difference < TOLERANCE:  # NaN neither
                    raise WrongAnswer(f"log-probabilities differ by {difference}: {where}")
