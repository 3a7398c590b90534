"""A step that fails on one rank fails on all, by name, and the next one works; nobody waits in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patched_ranks import patched_ranks
from planted_steps import PLANT_FILE

from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import UBatchFailed
from hocket.llm import LLM
from hocket.request import SamplingParams

NUM_RANKS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7] for i in range(12)]


@pytest.fixture(scope="module")
def plant_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failing") / "where"


@pytest.fixture(scope="module")
def group(plant_file: Path) -> Iterator[RankGroup]:
    with patched_ranks(NUM_RANKS, "planted_steps:install", **{PLANT_FILE: str(plant_file)}) as made:
        yield made


@pytest.mark.parametrize("executor", [None, "greenlet", "thread"])
def test_a_failed_step_is_named_and_the_next_one_works(
    group: RankGroup, plant_file: Path, checkpoints: Callable[..., Path], executor: str | None
) -> None:
    values = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    options = Options.from_dict(
        {
            "model": str(checkpoints("v2")),
            "skip_tokenizer_init": True,
            "data_parallel_size": NUM_RANKS,
            "enable_expert_parallel": True,
            "step_timeout": 20.0,
            **({} if executor is None else values | {"ubatch_executor": executor}),
        }
    )
    with LLM.from_options(options, group=group) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        for rank, ubatch, stage in ((0, 0, "attention"), (1, 1, "experts"), (2, 0, "router"), (2, 1, "attention")):
            if executor is None and ubatch:
                continue
            plant_file.write_text(f"{rank} {ubatch} {stage} raise")
            started = time.monotonic()
            with pytest.raises(UBatchFailed) as caught:
                llm.generate(PROMPTS, GREEDY)
            assert time.monotonic() - started < 10.0, "somebody waited for a rank"
            message = str(caught.value)
            assert f"failed on rank {rank}, ubatch {ubatch}" in message
            assert f"ValueError: planted in {stage}" in message
            assert "\n" not in message
            assert not llm.client.has_unfinished
            assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        for stats in llm.stats():
            assert stats["failed"] >= (2 if executor is None else 4)
            assert stats["kv_usage"] == 0.0
            if executor is not None:
                assert stats["overlap"]["split"] > 0
