"""Ranks that start late or never, or whose clocks are wrong."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from odd_starts import LATE_S, ODD_RANK
from patched_ranks import environment_of, patched_ranks

from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import RankLost
from hocket.llm import LLM
from hocket.request import SamplingParams

Checkpoints = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7] for i in range(8)]


def answers(model: Path, group: RankGroup) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """What a split engine says on these ranks, and their counters."""
    options = {"model": str(model), "skip_tokenizer_init": True, "data_parallel_size": 2, "step_timeout": 5.0}
    overlap = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    given = Options.from_dict(options | overlap | {"enable_expert_parallel": True})
    with LLM.from_options(given, group=group) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        return tokens, llm.stats()


def running_ranks(folder: Path) -> list[str]:
    """Processes whose command line names `folder`, where the group's sockets would be."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_text()
        except OSError:
            continue
        if "hocket.start_rank" in command and str(folder) in command:
            found.append(command)
    return found


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """With a limit of 15 s it is named 15 s later, and neither processes nor files are left."""
    limit_s = 15.0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in environment_of("odd_starts:late", **{ODD_RANK: str(rank), LATE_S: "1000"}).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(RankLost, match=rf"rank {rank} did not start within 15 s"):
        RankGroup.start(3, limit_s)
    assert limit_s <= time.monotonic() - began < limit_s + 10.0
    assert not running_ranks(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_starts_late_is_waited_for(checkpoints: Checkpoints) -> None:
    model, late_s = checkpoints("v2"), 20.0
    began = time.monotonic()
    with patched_ranks(2, "odd_starts:late", **{ODD_RANK: "1", LATE_S: str(late_s)}) as group:
        assert time.monotonic() - began >= late_s
        tokens, stats = answers(model, group)
    assert all(len(answer) == 8 for answer in tokens)
    assert all(rank["overlap"]["split"] > 0 for rank in stats)


def test_no_decision_depends_on_a_ranks_clock(groups: Any, checkpoints: Checkpoints) -> None:
    """A rank is weeks ahead and its clocks run 1.3 times too fast: same answers and same decisions on all ranks."""
    model = checkpoints("v2")
    expected, usual = answers(model, groups.get(2))
    for rank in (0, 1):
        with patched_ranks(2, "odd_starts:skewed", **{ODD_RANK: str(rank)}) as group:
            tokens, stats = answers(model, group)
        assert tokens == expected
        assert [s["overlap"]["reasons"] for s in stats] == [s["overlap"]["reasons"] for s in usual]
        assert stats[0]["overlap"]["split"] > 0
