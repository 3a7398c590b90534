"""One rank inside this process: the whole front and the whole engine, without processes or sockets. For tests only.

`in_process_llm(model, …)` gives an ordinary LLM whose rank can be looked into and changed: `group_of(llm).engine`. Each
`receive` of the front takes at most one step, so a test can go step by step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hocket.channel.messages import (
    Abort,
    AddRequests,
    FromRank,
    GetStats,
    RankMessage,
    Stats,
    StepOutputs,
    ToRank,
    decode_for_front,
    decode_for_rank,
    encode,
)
from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.dist.exchange import SoloExchange
from hocket.dist.mesh import Mesh
from hocket.engine import Engine
from hocket.llm import LLM


class InProcessGroup:
    """Stands in for a RankGroup of one rank. Messages are encoded and decoded as on their way between processes."""

    def __init__(self) -> None:
        self.world_size = 1
        self.ranks = range(1)
        self.last_heard = {0: 0.0}
        self.pids: dict[int, int] = {}
        self.closed = False
        self.num_steps = 0
        self._engine: Engine | None = None
        self._sent: list[bytes] = []

    @property
    def engine(self) -> Engine:
        """The rank's engine, there once the LLM is."""
        assert self._engine is not None, "no LLM has configured this group"
        return self._engine

    def configure(self, config: EngineConfig, on_progress: Any = None) -> list[dict[str, Any]]:
        device = torch.device(config.device, *[0] * (config.device != "cpu"))
        mesh = Mesh(rank=0, world_size=1, device=device)
        with torch.inference_mode():
            self._engine = Engine(config, mesh, SoloExchange(), lambda *_: None)
        return [self._engine.runner.info()]

    def send(self, rank: int, message: ToRank) -> None:
        assert rank == 0
        received = decode_for_rank(encode(message))
        if isinstance(received, AddRequests):
            self.engine.add(received.requests)
        elif isinstance(received, Abort):
            self.engine.abort(received.request_ids, received.reason)
        elif isinstance(received, GetStats):
            stats = self.engine.stats.snapshot() | asdict(self.engine.scheduler.counters())
            self._say(Stats(rank=0, stats={"rank": 0} | stats))
            if received.reset:
                self.engine.stats.reset()
        else:
            raise AssertionError(f"{message} is not for a rank in this process")

    def broadcast(self, message: ToRank) -> None:
        self.send(0, message)

    def receive(self, timeout_s: float) -> list[RankMessage]:
        """What the rank has said since the last call; where that is nothing, it takes a step if it has work."""
        self.last_heard[0] = time.monotonic()
        if not self._sent and self.engine.has_work:
            self.num_steps += 1
            with torch.inference_mode():
                outputs, _ = self.engine.step()
            self._say(StepOutputs(rank=0, outputs=outputs))
        said, self._sent = self._sent, []
        return [decode_for_front(raw) for raw in said]

    def _say(self, message: FromRank) -> None:
        self._sent.append(encode(message))

    def kill(self) -> None:
        self.closed = True

    close = kill


@contextmanager
def in_process_llm(model: str | Path, **options: Any) -> Iterator[LLM]:
    """An LLM of one rank in this process; `options` as for LLM(...), without a tokenizer unless asked for."""
    values = {"skip_tokenizer_init": True} | options | {"model": str(model), "data_parallel_size": 1}
    group: Any = InProcessGroup()
    with LLM.from_options(Options.from_dict(values), group=group) as llm:
        yield llm


def group_of(llm: LLM) -> InProcessGroup:
    """The group behind an LLM of `in_process_llm`."""
    group: Any = llm.client.group
    assert isinstance(group, InProcessGroup)
    return group


def engine_of(llm: LLM) -> Engine:
    """The engine behind an LLM of `in_process_llm`."""
    return group_of(llm).engine
