"""The check of `test_overlap` is not blind: each fault planted in ranks that split their steps is noticed by it.

Every configuration and case passes without a fault first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import more_checkpoints
import pytest
from faults import FAULT_FILE
from gloo_groups import Groups
from overlap_answers import Checker, WrongAnswer, WrongSteps
from overlap_cells import Case
from overlap_faults import OVERLAP_FAULTS
from pairwise import Cell
from patched_ranks import patched_environment

from hocket.dist.launcher import RankGroup
from hocket.errors import HocketError

STEP_TIMEOUT_S = 8.0
CONFIG: Cell = {
    "checkpoint": "v2",
    "transport": "torch",
    "executor": "greenlet",
    "ubatches": 2,
    "prefix": False,
    "chunk": 0,
    "threshold": "least",
}
PREFILL: Case = ((8, 7), "prefill")
DECODE: Case = ((8, 8), "decode")
MIXED: Case = ((40, 3), "mixed")
LONELY: Case = ((64, 1), "decode")
SAME_HEADS: Case = ((8, 8), "prefill")
"""On each rank the second prompt reads a block that the first one writes, where prefixes are cached."""
EXECUTORS = ("greenlet", "thread")
GATHER = {"transport": "allgather_reducescatter"}


@dataclass(frozen=True)
class Expectation:
    """How a fault shows itself: a wrong answer, wrong steps, or an error of the engine (a time-out is one)."""

    kind: type[Exception] | tuple[type[Exception], ...]
    cases: tuple[Case, ...] = (PREFILL, DECODE, MIXED)
    config: dict[str, Any] = field(default_factory=dict)


ANSWER, STEPS, ERROR = Expectation(WrongAnswer), Expectation(WrongSteps), Expectation(HocketError)
EXPECTATIONS: dict[str, Expectation] = {
    "seq_lens not corrected": Expectation(WrongAnswer, (PREFILL,)),
    "seq_lens corrected in place": Expectation(WrongAnswer, (PREFILL,)),
    "query_start_loc not re-based": ERROR,
    "slots of the first ubatch": ANSWER,
    "block tables of the first ubatch": ANSWER,
    "positions of the first ubatch": ANSWER,
    "tokens of the first ubatch": ANSWER,
    "padded as the whole batch on one rank": Expectation(HocketError, config=GATHER),
    "cut elsewhere on one rank": STEPS,
    "never split": STEPS,
    "thresholds ignored": Expectation(WrongSteps, (LONELY,), {"threshold": "8"}),
    "reader before writer": Expectation(WrongAnswer, (SAME_HEADS,), {"prefix": True}),
    "results in another order": ANSWER,
    "later ubatches lead": Expectation(WrongAnswer, (PREFILL,)),
    "empty ubatches return early": Expectation(HocketError, (LONELY,), {"threshold": "forced"}),
    "one attention plan for all": Expectation(WrongAnswer, (DECODE,)),
    "shared experts of the second ubatch lost": ANSWER,
    "dispatch received into a shared buffer": ERROR,
    "combine received into a shared buffer": Expectation((WrongAnswer, HocketError), (DECODE,)),  # nothing is in it yet
    "weights applied twice": ANSWER,
    "dropped slots computed": Expectation(WrongAnswer, config=GATHER),
    "combine added twice": ANSWER,
    "combine of the second ubatch lost": ANSWER,
    "padding rows kept": Expectation(HocketError, config=GATHER),
    "receive run twice on one rank": ERROR,
    "receive never run": ERROR,
}


class FaultyGroups(Groups):
    """Groups whose ranks plant the fault named in `file` in each engine they build."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.plant("")

    def plant(self, name: str) -> None:
        self.file.write_text(name)

    def start(self, num_ranks: int) -> RankGroup:
        with patched_environment("overlap_faults:install", **{FAULT_FILE: str(self.file)}):
            return super().start(num_ranks)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyGroups]:
    groups = FaultyGroups(tmp_path_factory.mktemp("fault") / "name")
    yield groups
    groups.close()


@pytest.fixture(scope="module")
def checker(
    faulty: FaultyGroups, checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Checker:
    return Checker(faulty, more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints), STEP_TIMEOUT_S)


@pytest.fixture
def plant(faulty: FaultyGroups) -> Iterator[Callable[[str], None]]:
    """Names the fault of all engines built from now on, to the end of the test."""
    faulty.plant("")
    yield faulty.plant
    faulty.plant("")


GOOD: set[str] = set()
"""What the check has passed without a fault."""


def pass_without_fault(checker: Checker, config: Cell, cases: tuple[Case, ...]) -> None:
    if f"{config} {cases}" not in GOOD:
        checker.check(config, cases)
        GOOD.add(f"{config} {cases}")


def test_every_fault_has_an_expectation() -> None:
    assert list(EXPECTATIONS) == list(OVERLAP_FAULTS)


@pytest.mark.parametrize(
    ("name", "executor"), [(name, EXECUTORS[i % 2]) for i, name in enumerate(OVERLAP_FAULTS)], ids=str
)
def test_every_fault_is_noticed(checker: Checker, plant: Callable[[str], None], name: str, executor: str) -> None:
    expected = EXPECTATIONS[name]
    config = CONFIG | expected.config | {"executor": executor}
    pass_without_fault(checker, config, expected.cases)
    plant(name)
    with pytest.raises(expected.kind) as caught:
        checker.check(config, expected.cases)
    print(f"{name}: {caught.type.__name__}: {caught.value}")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
def test_transfers_that_happen_in_their_receive_are_no_fault(
    checker: Checker, plant: Callable[[str], None], transport: str, executor: str
) -> None:
    """What "receive run twice" and its like are planted on top of."""
    checker.run_without_overlap(CONFIG | {"transport": transport}, (PREFILL, DECODE, MIXED, LONELY))
    plant("receive apart")
    for ubatches in (2, 3):
        config = CONFIG | {"transport": transport, "executor": executor, "ubatches": ubatches}
        checker.check(config, (PREFILL, DECODE, MIXED, LONELY))


def test_readers_before_their_writers_are_not_split(checker: Checker, plant: Callable[[str], None]) -> None:
    """What "reader before writer" is planted on top of: the veto stops the split, and answers stay right."""
    config = CONFIG | {"prefix": True}
    checker.run_without_overlap(config, [SAME_HEADS])
    plant("readers first")
    (stats,) = checker.check_answers(config, [SAME_HEADS])
    for rank in stats:
        assert rank["overlap"]["reasons"]["prefill"] == {"prefix_hazard": 1}
        assert rank["overlap"]["reasons"]["decode"] == {"split": 1}
