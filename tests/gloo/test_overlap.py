"""Dual batch overlap in the whole engine: the answers are transformers' and those without overlap, every step was
split, or not, as it must be, and cut where it must be.

A cell is a configuration of the engine with one number of tokens per rank and one phase. The CI takes a pairwise cover
of all dimensions, `-m full` every cell.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import more_checkpoints
import pytest
from gloo_groups import Groups
from overlap_answers import Checker
from overlap_cells import (
    CASES,
    PHASES,
    SIZES,
    Case,
    asks_of,
    cuts_a_request,
    main_step,
    phase_of,
    reason_of,
    steps_of,
    tokens_of,
)
from overlap_grid import DIMENSIONS, FAMILIES, GRID, choose, config_id
from pairwise import Cell

COVER = choose()
MOST_CELLS = 150
PARTS = list(itertools.product(DIMENSIONS["family"], DIMENSIONS["transport"], DIMENSIONS["ubatches"]))


@pytest.fixture(scope="module")
def checker(
    groups: Groups, checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checker]:
    made = Checker(groups, more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints))
    yield made
    print(f"\n{made.num_cells} cells of (configuration, tokens per rank, phase) gave the same answers")


def test_the_cover_leaves_nothing_out() -> None:
    """Each size and each phase is split with each number of ubatches; mixed steps are mixed; requests are cut."""
    assert sum(len(cases) for _, cases in COVER) <= MOST_CELLS
    split: set[tuple[object, ...]] = set()
    cut: set[tuple[object, ...]] = set()
    unsplit = 0
    assert {config["checkpoint"] for config, _ in COVER} == {name for names in FAMILIES.values() for name in names}
    for config, cases in COVER:
        for size, phase in cases:
            step, ubatches = main_step(size, phase, config), config["ubatches"]
            if reason_of(step, config) == "split":
                split |= {(ubatches, size), (ubatches, phase)}
                split |= {(ubatches, name, config[name]) for name in DIMENSIONS if name != "threshold"}
                if cuts_a_request(step, ubatches):
                    cut |= {(ubatches, phase)}
            else:
                unsplit += 1
    assert {(n, size) for n in (2, 3, 4) for size in SIZES} <= split
    assert {(n, phase) for n in (2, 3, 4) for phase in PHASES} <= split
    several = [name for name in DIMENSIONS if name not in ("threshold", "ubatches")]
    assert {(n, name, value) for n in (2, 3, 4) for name in several for value in DIMENSIONS[name]} <= split
    assert {(n, phase) for n in (2, 3, 4) for phase in ("prefill", "mixed")} <= cut
    assert unsplit > 0


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("chunk", DIMENSIONS["chunk"])
def test_cells_have_the_size_and_the_phase_they_are_named_after(chunk: int, prefix: bool) -> None:
    config = {"chunk": chunk, "prefix": prefix}
    for size, phase in CASES:
        step = main_step(size, phase, config)
        assert tokens_of(step) == list(size)
        if phase == "mixed":  # on each rank that has the tokens for it; ranks of one token differ in what it is
            assert all(phase_of(parts) == "mixed" for parts in step if sum(p.num_tokens for p in parts) > 1)
        else:
            assert all(phase_of(parts) == phase for parts in step if parts)
    if chunk:
        longest = [part.num_tokens for case in CASES for step in steps_of(asks_of(*case, config), config)
                   for parts in step for part in parts]  # fmt: skip
        assert max(longest) == chunk


@pytest.mark.parametrize(("config", "cases"), COVER, ids=[config_id(config) for config, _ in COVER])
def test_same_answers(checker: Checker, config: Cell, cases: list[Case]) -> None:
    checker.check(config, cases)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "transport", "ubatches"), PARTS)
def test_full_grid(
    checker: Checker, capsys: pytest.CaptureFixture[str], family: str, transport: str, ubatches: int
) -> None:
    """Every cell; a part of the grid can be run alone, such as `-m full -k "full_grid and qwen3 and emulated"`."""
    wanted = {"family": family, "transport": transport, "ubatches": ubatches}
    configs = [config for config in GRID if wanted.items() <= config.items()]
    before, started = checker.num_cells, time.monotonic()
    for config in configs:
        checker.check(config, CASES)
    assert checker.num_cells - before == len(configs) * len(CASES)
    with capsys.disabled():
        seconds = time.monotonic() - started
        print(
            f" {len(configs)} configurations, {checker.num_cells - before} cells in {seconds:.0f} s; "
            f"{checker.num_cells} cells so far",
            flush=True,
        )
