"""Compares the answers of two runs, token by token. Knows only plain values; torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hocket.errors import ConfigError

TOLERANCES = {
    "float32": (1e-4, 1e-4, 0.0),
    "float16": (0.1, 0.02, 0.02),
    "bfloat16": (0.5, 0.1, 0.02),
}
"""By dtype: `logprob`, `state` and `stray` of Rules. Sums in another order (other rows in a product, other ranks first)
change the last bits of a number, layers carry that on, and where two experts are about equally good for a token it may
get the other one: in half precision some tokens always do."""
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of the dtypes whose sums differ so much that how much is measured in the run itself (`Rules.measured`)."""
MOST, FACTOR, LEAST_EPS = 0.9, 2.0, 8.0
FEW, MIN_TOKENS = 0.2, 20


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What counts as the same.

    logprob: most that the log-probability of a token may differ. tie: the runs may choose two tokens whose
    log-probabilities, in both runs, are no further apart. state: most that a row of hidden states may differ, as a
    share of its length; stray: the share of a layer's rows that may differ more. exact: nothing may differ, to the last
    bit. usual: no more than a share of FEW of the tokens (where there are MIN_TOKENS) may have a log-probability that
    differs by more; None: not looked at.
    """

    logprob: float
    tie: float
    state: float
    stray: float
    exact: bool = False
    usual: float | None = None

    @classmethod
    def of(cls, dtype: str, *, exact: bool, logprob: float | None = None, tie: float | None = None) -> Rules:
        """Those of a dtype, or as given; `tie` is twice `logprob` by default, as each of two tokens may move so far.

        Raises:
            ConfigError: tolerances are given beside `exact`.
        """
        given = {"tolerance": logprob, "tie_tolerance": tie}
        for name, value in given.items():
            if value is not None and exact:
                raise ConfigError(name, value, "not to give it", where="with deterministic, which allows no difference")
        usual, state, stray = (0.0, 0.0, 0.0) if exact else TOLERANCES[dtype]
        logprob = usual if logprob is None else logprob
        tie = 2 * logprob if tie is None else tie
        return cls(logprob=logprob, tie=tie, state=state, stray=stray, exact=exact)

    def measured(self, noise: float, dtype: str) -> Rules:
        """With `usual` from a run that differs from the first in nothing but the order of sums: FACTOR times what a
        share of MOST of its tokens differ by at most (`Comparison.usual_difference`), but at least LEAST_EPS of the
        dtype's eps, as so much a run may differ by whose sums had the same order by chance.

        `logprob` must allow for one token that gets another expert, some ten times as much as `usual`: alone it would
        let pass what moves all tokens a little.
        """
        return replace(self, usual=max(FACTOR * noise, LEAST_EPS * EPS[dtype]))


@dataclass(frozen=True)
class Answer:
    """What one request generated: tokens, and at each of them log-probabilities by token (its own, the likeliest)."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class Difference:
    """Where a request differs first. request, token: numbers from 0. found, expected: token ids (None: there is none).

    logprobs: those of these two tokens, each in its own run. logprob_difference: the largest of any token there.
    """

    request: int
    token: int
    found: int | None
    expected: int | None
    logprobs: tuple[float | None, float | None]
    logprob_difference: float


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other. num_tokens: those compared: of a request all up to a tie, since what follows it
    answers to another text. first: the first request's first difference that the rules do not allow. num_compared:
    tokens whose log-probabilities were compared; a share of MOST of them differ by no more than usual_difference,
    num_unusual by more than the rules' `usual`; drifts: these are too many."""

    num_requests: int
    num_same_requests: int
    num_tokens: int
    num_same_tokens: int
    num_ties: int
    largest_logprob_difference: float
    first: Difference | None
    num_compared: int
    usual_difference: float
    num_unusual: int
    drifts: bool

    @property
    def agrees(self) -> bool:
        return self.first is None and not self.drifts


@dataclass
class _Found:
    num_tokens: int = 0
    num_same: int = 0
    num_ties: int = 0
    differences: list[float] = field(default_factory=list)
    first: Difference | None = None


def compare(expected: Sequence[Answer], found: Sequence[Answer], rules: Rules) -> Comparison:
    """Request by request, in order. Raises ValueError where there are not as many."""
    each = [_compare_request(i, a, b, rules) for i, (a, b) in enumerate(zip(expected, found, strict=True))]
    differences = sorted(difference for one in each for difference in one.differences)
    count, usual = len(differences), math.inf if rules.usual is None else rules.usual
    num_unusual = sum(difference > usual for difference in differences)
    return Comparison(
        num_requests=len(each),
        num_same_requests=sum(one.first is None for one in each),
        num_tokens=sum(one.num_tokens for one in each),
        num_same_tokens=sum(one.num_same for one in each),
        num_ties=sum(one.num_ties for one in each),
        largest_logprob_difference=max(differences, default=0.0),
        first=next((one.first for one in each if one.first is not None), None),
        num_compared=count,
        usual_difference=differences[math.ceil(MOST * count) - 1] if count else 0.0,
        num_unusual=num_unusual,
        drifts=count >= MIN_TOKENS and num_unusual > FEW * count,
    )


def _compare_request(number: int, expected: Answer, found: Answer, rules: Rules) -> _Found:
    """Log-probabilities count as long as both runs have the same tokens before them."""
    result, is_same_text = _Found(), True
    for token in range(max(len(expected.token_ids), len(found.token_ids))):
        theirs, ours = _at(expected.token_ids, token), _at(found.token_ids, token)
        result.num_tokens += 1
        result.num_same += ours == theirs
        if not is_same_text:
            continue
        difference = 0.0
        if ours is not None and theirs is not None:
            before, after = expected.logprobs[token], found.logprobs[token]
            difference = _largest_difference(before, after)
            result.differences.append(difference)
            if ours != theirs and difference <= rules.logprob and _is_tie(ours, theirs, before, after, rules):
                result.num_ties += 1
                result.num_tokens -= 1
                return result
            if ours == theirs and _is_allowed(before, after, difference, rules):
                continue
        is_same_text = ours == theirs
        own = _logprob(found, token), _logprob(expected, token)
        result.first = result.first or Difference(number, token, ours, theirs, own, difference)
    return result


def _at(values: Sequence[int], index: int) -> int | None:
    return values[index] if index < len(values) else None


def _logprob(answer: Answer, token: int) -> float | None:
    return answer.logprobs[token].get(answer.token_ids[token]) if token < len(answer.token_ids) else None


def _largest_difference(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """At least so much do the log-probabilities of some token differ. One that is not among a run's likeliest is there
    no likelier than the last of them. NaN: infinite."""
    differences = [abs(a[token] - b[token]) for token in a.keys() & b.keys() if a[token] != b[token]]
    for one, other in ((a, b), (b, a)):
        least = min(other.values(), default=-math.inf)
        differences += [one[token] - least for token in one.keys() - other.keys()]
    return max([0.0, *(math.inf if math.isnan(one) else one for one in differences)])


def _is_allowed(a: Mapping[int, float], b: Mapping[int, float], difference: float, rules: Rules) -> bool:
    return dict(a) == dict(b) if rules.exact else difference <= rules.logprob


def _is_tie(one: int, other: int, a: Mapping[int, float], b: Mapping[int, float], rules: Rules) -> bool:
    """Whether both runs find the two tokens about equally likely."""
    if rules.exact or not all(token in row for token in (one, other) for row in (a, b)):
        return False
    return all(abs(row[one] - row[other]) <= rules.tie for row in (a, b))
