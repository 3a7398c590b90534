"""The comm lane, the step exchange and all else never share a process group: gloo mixes up what two threads send.

Every collective that a rank calls is written down by group and thread, in a running engine whose steps are split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from patched_ranks import patched_ranks
from spied_groups import SPY_FAULT, SPY_FOLDER

from hocket.config.options import Options
from hocket.llm import LLM
from hocket.request import SamplingParams

Checkpoints = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def calls_of(model: Path, folder: Path, fault: str, **options: object) -> list[dict[str, set[str]]]:
    """Per rank: the threads that used each process group while split steps ran."""
    overlap = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    values = {"model": str(model), "skip_tokenizer_init": True, "data_parallel_size": 2, "step_timeout": 10.0}
    given = Options.from_dict(values | overlap | {"enable_expert_parallel": True} | options)
    with patched_ranks(2, "spied_groups:install", **{SPY_FOLDER: str(folder), SPY_FAULT: fault}) as group:
        pids = [group.pids[rank] for rank in range(2)]
        with LLM.from_options(given, group=group) as llm:
            llm.generate([[5 + i, 6, 7] for i in range(8)], GREEDY)
            assert all(rank["overlap"]["split"] == rank["steps"] - 1 for rank in llm.stats()), "but the last, idle one"
    found = []
    for pid in pids:
        threads = defaultdict(set)
        for line in (folder / str(pid)).read_text().splitlines():
            name, thread, _ = line.split()
            threads[name].add(thread)
        found.append(dict(threads))
    return found


def shared_groups(calls: list[dict[str, set[str]]]) -> list[str]:
    return [name for threads in calls for name, users in threads.items() if "comm-lane" in users and len(users) > 1]


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
@pytest.mark.parametrize("transport", ["torch", "allgather_reducescatter"])
def test_no_group_has_two_users(checkpoints: Checkpoints, tmp_path: Path, executor: str, transport: str) -> None:
    calls = calls_of(checkpoints("v2"), tmp_path, "", ubatch_executor=executor, all2all_backend=transport)
    assert not shared_groups(calls)
    for rank, threads in enumerate(calls):
        lanes = [name for name, users in threads.items() if users == {"comm-lane"}]
        assert len(lanes) == 1, "one group for the experts' transfers, and it was used"
        assert "default" not in lanes
        assert ("exchange-socket" in threads) == (rank == 0), "the exchange has sockets of its own"


def test_a_shared_group_is_noticed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert len(shared_groups(calls_of(checkpoints("v2"), tmp_path, "wrong"))) == 2
