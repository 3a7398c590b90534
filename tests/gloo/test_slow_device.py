"""A rank whose device does not end a step: nothing on its host waits for another rank, yet that one is to blame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gloo_groups import poll_to_the_end
from patched_ranks import patched_ranks
from slow_device import STUCK_FILE

from hocket.config.options import Options
from hocket.errors import RankLost
from hocket.llm import LLM
from hocket.request import SamplingParams


@pytest.mark.parametrize("is_stopped", [True, False])
def test_who_is_named(checkpoints: Callable[..., Path], tmp_path: Path, is_stopped: bool) -> None:
    """Stopped: rank 1 says nothing, as when its process hangs in a collective that rank 0's device waits for."""
    file = tmp_path / "stuck"
    here = file.with_name("stuck.here")
    with patched_ranks(2, "slow_device:install", **{STUCK_FILE: str(file)}) as group:
        options = {"skip_tokenizer_init": True, "data_parallel_size": 2, "enable_expert_parallel": True}
        values = {"model": str(checkpoints("v2")), "step_timeout": 3.0, **options}
        with LLM.from_options(Options.from_dict(values), group=group) as llm:
            file.write_text("0")
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            llm.client.add_many([(str(i), [5 + i, 6], params, i % 2) for i in range(4)])
            deadline = time.monotonic() + 20.0
            while not here.exists() and time.monotonic() < deadline:
                llm.client.poll(0.01)
            began = time.monotonic()
            if is_stopped:
                os.kill(group.pids[1], signal.SIGSTOP)
            expected = r"rank 1 stopped answering" if is_stopped else r"rank 0\b.*(has not ended a step|late|answer)"
            with pytest.raises(RankLost, match=expected):
                poll_to_the_end(llm)
            assert time.monotonic() - began < 10.0
