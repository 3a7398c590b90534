"""Long-lived rank processes: one group per number of ranks, re-configured for each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.llm import LLM

STEP_TIMEOUT_S = 20.0


def poll_to_the_end(llm: LLM) -> None:
    """Until no request is left; raises what ends the group."""
    while llm.client.has_unfinished:
        llm.client.poll(1.0)


class Groups:
    """Starts a group of n ranks when it is first asked for, and again when a test has ended it.

    defaults: options of all its engines where a test gives no others.
    """

    def __init__(self, **defaults: Any) -> None:
        self._defaults = defaults
        self._groups: dict[int, RankGroup] = {}

    def get(self, num_ranks: int) -> RankGroup:
        group = self._groups.get(num_ranks)
        if group is None or group.closed:
            group = self._groups[num_ranks] = self.start(num_ranks)
        return group

    def start(self, num_ranks: int) -> RankGroup:
        return RankGroup.start(num_ranks, 120.0)

    @contextmanager
    def llm(self, model: str | Path, num_ranks: int = 1, **options: Any) -> Iterator[LLM]:
        """An LLM on running ranks; `options` as for LLM(...)."""
        given = {"skip_tokenizer_init": True, "step_timeout": STEP_TIMEOUT_S, "enable_expert_parallel": True}
        values = given | self._defaults | options | {"model": str(model), "data_parallel_size": num_ranks}
        with LLM.from_options(Options.from_dict(values), group=self.get(num_ranks)) as llm:
            yield llm

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
