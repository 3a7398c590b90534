"""Who is blamed when a rank has stopped and another one is too slow to say that it waits for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gloo_groups import poll_to_the_end
from patched_ranks import patched_ranks
from slow_report import STOPS

from hocket.config.options import Options
from hocket.errors import RankLost
from hocket.llm import LLM
from hocket.request import SamplingParams


def test_the_one_that_does_not_run_is_named_alone(checkpoints: Callable[..., Path]) -> None:
    """No transfer tells the two apart: all ranks have taken part in as many."""
    options = {"skip_tokenizer_init": True, "data_parallel_size": 3, "enable_expert_parallel": True}
    values = {"model": str(checkpoints("v2")), "step_timeout": 3.0, **options}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with (
        patched_ranks(3, "slow_report:install") as group,
        LLM.from_options(Options.from_dict(values), group=group) as llm,
    ):
        llm.client.add_many([(str(i), [5 + i, 6], params, i) for i in range(3)])
        with pytest.raises(RankLost) as caught:
            poll_to_the_end(llm)
    assert re.match(rf"rank {STOPS} stopped answering", str(caught.value)), caught.value
