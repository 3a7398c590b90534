"""Giving back DeepEP's buffers waits for all ranks: where one does not come, the others end in time and say so."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from answers import greedy
from patched_ranks import patched_ranks

from hocket.config import resolve
from hocket.config.options import Options
from hocket.dist import launcher
from hocket.dist.launcher import RankGroup
from hocket.errors import RankLost
from hocket.llm import LLM

STEP_TIMEOUT_S = 3.0
IN_TIME_S = 10.0


@contextmanager
def served(
    model: Path, monkeypatch: pytest.MonkeyPatch, patch: str, step_timeout: float = STEP_TIMEOUT_S
) -> Iterator[tuple[RankGroup, Options]]:
    """Two ranks that have answered over DeepEP's stand-in; afterwards none of them runs."""
    monkeypatch.setattr(resolve, "GPU_TRANSPORTS", ())
    values: dict[str, Any] = {
        "model": str(model),
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": "deepep_low_latency",
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
        "step_timeout": step_timeout,
    }
    with patched_ranks(2, patch) as group:
        pids = list(group.pids.values())
        options = Options.from_dict(values)
        with LLM.from_options(options, group=group) as llm:
            llm.generate([[5, 6, 7], [8, 9]], greedy(3), use_tqdm=False)
        yield group, options
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_rank_that_has_stopped_is_named_before_anybody_waits_for_it(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(checkpoints("v2"), monkeypatch, "fake_deep_ep:install") as (group, options):
        os.kill(group.pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"^rank 1 stopped answering; .*rank 1 did not reach the step exchange"):
            LLM.from_options(options, group=group)
        assert time.monotonic() - began < IN_TIME_S


def test_a_library_that_waits_for_ever_is_ended(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = r"^rank [01] ended unexpectedly \(exit code 1\) \(rank 0: .*, giving back what its transfers took; "
    with served(checkpoints("v2"), monkeypatch, "hanging_close:install") as (group, options):
        began = time.monotonic()
        with pytest.raises(RankLost, match=expected):
            LLM.from_options(options, group=group)
        assert STEP_TIMEOUT_S < time.monotonic() - began < IN_TIME_S


def test_a_group_that_closes_kills_who_is_left_and_names_it(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "_CLOSE_S", 3.0)
    with served(checkpoints("v2"), monkeypatch, "hanging_close:install", step_timeout=60.0) as (group, _):
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < IN_TIME_S
    [record] = [one for one in caplog.records if one.levelno == logging.WARNING]
    said = record.getMessage()
    assert said.startswith("rank 0, 1 did not end within 3 s of being told to: killed (rank 0: step ")
    assert said.count("giving back what its transfers took") == 2


def test_ranks_that_end_by_themselves_are_not_spoken_of(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(checkpoints("v2"), monkeypatch, "fake_deep_ep:install") as (group, _):
        group.close()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
