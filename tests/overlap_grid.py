"""The overlap grid: every configuration of an engine, and the few with which every two dimensions meet.

Knows neither requests nor answers.
"""

from __future__ import annotations

import random
from typing import Any

import checkpoints
import more_checkpoints
from overlap_cells import CASES, CHUNK, PHASES, SIZES, Case, main_step, reason_of
from pairwise import Cell, cover, full_grid, pairwise_cover

FAMILIES: dict[str, tuple[str, ...]] = {
    "v2": ("v2", "v2-tied", "v2-linear", "v2-bias"),
    "v2-groups": ("v2-groups", "v2-yarn", "v2-yarn-plain"),
    "v3": ("v3", "v3-tied", "v3-yarn", "v3-halves", "v3-no-groups", "v3-yarn-equal-ranks"),
    "qwen3": ("qwen3", "qwen3-no-norm", "qwen3-yarn", "qwen3-many-experts"),
    "qwen3-dense": ("qwen3-dense-layer", "qwen3-first-dense", "qwen3-two-experts"),
}
"""Checkpoints by family; a configuration of a family has one of them. (OLMoE is not of Hocket's own models.)"""
assert {name for names in FAMILIES.values() for name in names} == {
    *checkpoints.CONFIGS, *more_checkpoints.CONFIGS
} - {"olmoe"}  # fmt: skip

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "transport": ("torch", "allgather_reducescatter", "emulated-torch", "emulated-allgather_reducescatter"),
    "executor": ("greenlet", "thread"),
    "ubatches": (1, 2, 3, 4),
    "prefix": (False, True),
    "chunk": (0, CHUNK),
    "threshold": ("least", "8", "forced"),
}


def allowed(config: Cell) -> bool:
    """With one ubatch there is nothing to execute in turns and nothing to compare with a threshold or to force."""
    return bool(config["ubatches"] > 1) or (config["executor"] == "greenlet" and config["threshold"] == "least")


def with_checkpoint(config: Cell) -> Cell:
    """The configuration with one of its family's checkpoints, always the same one."""
    draw = random.Random(config_id(config))
    return {**config, "checkpoint": draw.choice(FAMILIES[config["family"]])}


def config_id(config: Cell) -> str:
    return "-".join(str(value) for value in config.values())


GRID = [with_checkpoint(config) for config in full_grid(DIMENSIONS, allowed)]
"""Every configuration."""


def choose() -> list[tuple[Cell, list[Case]]]:
    """Few configurations with some cases each, such that every two values of any two dimensions meet.

    "way", how many ubatches and whether the cell's own step is split, is a dimension too, so that each size, phase,
    model, transport and executor is really split with each number of ubatches. Checkpoints that no
    configuration drew get one size in all phases.
    """
    configs = [with_checkpoint(config) for config in pairwise_cover(DIMENSIONS, allowed)]
    cells = []
    for number, config in enumerate(configs):
        for size, phase in CASES:
            way = (config["ubatches"], reason_of(main_step(size, phase, config), config))
            cells.append({**config, "size": size, "phase": phase, "way": way, "config": number})
    ignored = ("checkpoint", "config", "ubatches")
    chosen = cover(cells, lambda cell: {name: value for name, value in cell.items() if name not in ignored})
    cases: dict[int, list[Case]] = {number: [] for number in range(len(configs))}
    for cell in chosen:
        cases[cell["config"]].append((cell["size"], cell["phase"]))
    found = [(configs[number], sorted(of_config)) for number, of_config in cases.items() if of_config]
    rest = {name for names in FAMILIES.values() for name in names} - {config["checkpoint"] for config, _ in found}
    for name in sorted(rest):
        config = next(c for c in GRID if c["checkpoint"] == name and c["ubatches"] > 1 and c["threshold"] == "least")
        found.append((config, [(SIZES[1], phase) for phase in PHASES]))
    return found
