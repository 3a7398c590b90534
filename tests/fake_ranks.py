"""Ranks without a model: they answer each request with the tokens that a test says, one a step. For tests of the front.

A step is taken whenever the front asks what there is, or (`paused`) when the test says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hocket.channel.messages import (
    Abort,
    AddRequests,
    RankMessage,
    StepFailed,
    StepOutputs,
    ToRank,
    decode_for_front,
    decode_for_rank,
    encode,
)
from hocket.errors import RankLost
from hocket.outputs import TokenLogprobs, TokenOutput
from hocket.request import EngineRequest

Script = Callable[[EngineRequest], Sequence[int]]


class FakeGroup:
    """Stands in for a configured RankGroup. `script`: the tokens of a request; behind them it ends with "stop".

    sent: what each rank was sent. num_steps: steps taken.
    """

    def __init__(self, script: Script, num_ranks: int = 2) -> None:
        self.script = script
        self.world_size = num_ranks
        self.ranks = range(num_ranks)
        self.last_heard = dict.fromkeys(self.ranks, 0.0)
        self.pids: dict[int, int] = {}
        self.closed = False
        self.paused = False
        self.num_steps = 0
        self.sent: list[tuple[int, ToRank]] = []
        self._running: dict[str, tuple[int, EngineRequest, list[int]]] = {}
        self._said: list[bytes] = []
        self._loss: RankLost | None = None
        self._event = os.eventfd(0)

    def configure(self, config: Any, on_progress: Any = None) -> list[dict[str, Any]]:
        return [{"moe_backend": "fake", "num_blocks": 1, "num_threads": 1, "startup_s": {}} for _ in self.ranks]

    def send(self, rank: int, message: ToRank) -> None:
        received = decode_for_rank(encode(message))
        self.sent.append((rank, received))
        if isinstance(received, AddRequests):
            self._running |= {r.request_id: (rank, r, list(self.script(r))) for r in received.requests}
        elif isinstance(received, Abort):
            for request_id in received.request_ids:
                assert self._running.pop(request_id)[0] == rank, "told the wrong rank"

    def broadcast(self, message: ToRank) -> None:
        for rank in self.ranks:
            self.send(rank, message)

    def filenos(self) -> list[int]:
        return [self._event]

    def watch_leaving(self, on_leaving: Any) -> None: ...

    def has_messages(self) -> bool:
        return bool(self._said) or self._loss is not None or (not self.paused and bool(self._running))

    def receive(self, timeout_s: float) -> list[RankMessage]:
        if self._loss is not None:
            self.kill()
            raise self._loss
        self.last_heard = dict.fromkeys(self.ranks, time.monotonic())
        if not self.paused:
            self.step()
        said, self._said = self._said, []
        return [decode_for_front(raw) for raw in said]

    def step(self, ranks: Sequence[int] | None = None) -> None:
        """Each running request gains a token; ranks: those of these ranks only."""
        self.num_steps += 1
        for rank in self.ranks if ranks is None else ranks:
            outputs = [self._gain(*entry[1:]) for entry in list(self._running.values()) if entry[0] == rank]
            if outputs:
                self._said.append(encode(StepOutputs(rank=rank, outputs=outputs)))

    def _gain(self, request: EngineRequest, left: list[int]) -> TokenOutput:
        token = left.pop(0) if left else next(iter(request.eos_token_ids), 5)
        is_stop = not left and token in request.eos_token_ids
        num_done = request.max_tokens = request.max_tokens - 1
        reason = "stop" if is_stop else "length" if num_done == 0 else None
        if reason is not None:
            del self._running[request.request_id]
        top = range(request.params.logprobs or 0)
        position = TokenLogprobs([token, *top], [-1.0, *(-float("inf") if i else -0.5 for i in top)], 1 + len(top))
        prompt: list[TokenLogprobs | None] | None = None
        if request.params.prompt_logprobs is not None:
            prompt = [None, *(TokenLogprobs([i], [-2.0], 1) for i in request.prompt_token_ids[1:])]
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=None if request.params.logprobs is None else [position],
            prompt_logprobs=prompt,
            finish_reason=reason,
        )

    def fail_step(self, message: str) -> None:
        """The next messages say that a step with all requests failed on rank 0."""
        ids, self._running = list(self._running), {}
        self._said.append(encode(StepFailed(rank=0, message=message, is_cause=True, request_ids=ids)))
        os.eventfd_write(self._event, 1)

    def lose(self, message: str) -> None:
        """From now on a rank is gone."""
        self._loss = RankLost(message)
        os.eventfd_write(self._event, 1)

    def kill(self, why: str = "") -> None:
        self.closed = True

    close = kill
