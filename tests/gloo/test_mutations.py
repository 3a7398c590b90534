"""The check of `test_same_answers` is not blind: it fails on every fault planted in a running engine.

The check has passed without the fault before: once for each checkpoint, options and kind of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import more_checkpoints
import pytest
import torch
from checkpoints import hf_reference
from faults import FAULT_FILE, FAULTS, RANK_FAULTS, V2, V3, lose_expert, model_of
from in_process import engine_of, in_process_llm
from model_faults import moe_layers
from patched_ranks import patched_ranks
from test_same_answers import NUM_TOKENS, TOLERANCE, check, prompts_of, run

from hocket.cache import manager
from hocket.cache.prefix import ROOT_HASH, hash_block
from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.llm import LLM

Checkpoints = Callable[..., Path]
OPTIONS: dict[str, Any] = {"block_size": 8, "max_num_seqs": 16, "enable_prefix_caching": False}
GOOD: set[str] = set()
"""What the check has passed without a fault."""


@pytest.fixture(scope="module")
def checkpoints(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Further checkpoints besides those of the whole session."""
    return more_checkpoints.maker(tmp_path_factory.mktemp("more"), checkpoints)


def wrong(llm: LLM, path: Path, prompts: list[list[int]] | None = None) -> str:
    """What is wrong with the answers, "" when the check passes; with prefix caching also with the second answers."""
    for _ in range(2 if llm.options.enable_prefix_caching else 1):
        results = run(llm, prompts_of(path) if prompts is None else prompts)
        try:
            worst = max(check(path, result) for result in results)
        except AssertionError as error:
            return str(error) or "tokens differ"
        if not worst < TOLERANCE:
            return f"log-probabilities differ by {worst}"
    return ""


def pass_without_fault(path: Path, options: dict[str, Any]) -> None:
    key = f"{path} {options}"
    if key not in GOOD:
        with in_process_llm(path, **options) as llm:
            assert wrong(llm, path) == ""
        GOOD.add(key)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_noticed(checkpoints: Checkpoints, name: str) -> None:
    fault = FAULTS[name]
    path, options = checkpoints(fault.model), OPTIONS | fault.options
    pass_without_fault(path, options)
    with in_process_llm(path, **options) as llm:
        with torch.inference_mode():
            fault.plant(engine_of(llm))
        assert wrong(llm, path)


@pytest.mark.parametrize("model", [V2, V3, "qwen3"])
def test_the_least_used_expert_lost_is_noticed(checkpoints: Checkpoints, model: str) -> None:
    path = checkpoints(model)
    with in_process_llm(path, **OPTIONS) as llm:
        layers = moe_layers(model_of(engine_of(llm)))
        for layer in layers:
            layer.count_expert_load()
        assert wrong(llm, path) == ""
        load = torch.stack([layer.expert_load for layer in layers])  # type: ignore[misc]
    assert (load > 0).all(), "the prompts must reach every expert"
    layer_idx, expert = divmod(int(load.argmin()), load.shape[1])
    with in_process_llm(path, **OPTIONS) as llm:
        with torch.inference_mode():
            lose_expert(engine_of(llm), layer_idx, expert)
        assert wrong(llm, path)


def test_blocks_named_without_their_parents_are_noticed(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts that differ in their first block and agree in the second."""
    path = checkpoints(V2)
    one = prompts_of(path)[12]
    other = prompts_of(path)[13][:8] + one[8:]
    assert hf_reference(path).margin(other + hf_reference(path).greedy(other, NUM_TOKENS), len(other)) > 1e-5
    options = OPTIONS | {"enable_prefix_caching": True}
    with in_process_llm(path, **options) as llm:
        assert wrong(llm, path, [one]) == ""
        assert wrong(llm, path, [other]) == ""

    def without_parents(hashes: list[bytes], token_ids: list[int], block_size: int, num_blocks: int) -> None:
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            hashes.append(hash_block(ROOT_HASH, token_ids[start : start + block_size]))

    monkeypatch.setattr(manager, "extend_hashes", without_parents)
    with in_process_llm(path, **options) as llm:
        assert wrong(llm, path, [one]) == ""
        assert wrong(llm, path, [other])


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "name"


@pytest.fixture(scope="module")
def faulty_ranks(fault_file: Path) -> Iterator[RankGroup]:
    """Two ranks that plant the fault named in `fault_file` in each engine they build."""
    fault_file.write_text("")
    with patched_ranks(2, "faults:install", **{FAULT_FILE: str(fault_file)}) as group:
        yield group


def wide(path: Path, transport: str) -> Options:
    given = {"model": str(path), "skip_tokenizer_init": True, "data_parallel_size": 2, "enable_expert_parallel": True}
    return Options.from_dict(given | OPTIONS | {"all2all_backend": transport, "step_timeout": 20.0})


@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
@pytest.mark.parametrize("name", RANK_FAULTS)
def test_every_fault_between_ranks_is_noticed(
    checkpoints: Checkpoints, faulty_ranks: RankGroup, fault_file: Path, name: str, transport: str
) -> None:
    path = checkpoints(V3)
    options = wide(path, transport)
    if transport not in GOOD:
        fault_file.write_text("")
        with LLM.from_options(options, group=faulty_ranks) as llm:
            assert wrong(llm, path) == ""
        GOOD.add(transport)
    fault_file.write_text(name)
    with LLM.from_options(options, group=faulty_ranks) as llm:
        assert wrong(llm, path)
