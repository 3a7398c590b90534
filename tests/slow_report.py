"""A rank that stops itself between two steps, and another whose last words take their time (patched_ranks.py)."""

from __future__ import annotations

import os
import signal
import time

from hocket.channel.messages import Failed, FromRank
from hocket.channel.rank import RankChannel
from hocket.engine import Engine
from hocket.outputs import TokenOutput
from hocket.overlap.vote import StepPlan

STOPS, IS_SLOW = 1, 2
STEPS_BEFORE = 3
WORDS_TAKE_S = 30.0
"""Far longer than the front waits for them."""


def install() -> None:
    step, send = Engine.step, RankChannel.send

    def step_or_stop(self: Engine) -> tuple[list[TokenOutput], StepPlan]:
        mesh = self.runner.mesh
        if mesh.rank == STOPS and mesh.record.steps == STEPS_BEFORE:
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(self)

    def send_late(self: RankChannel, message: FromRank) -> None:
        if isinstance(message, Failed) and message.rank == IS_SLOW:
            time.sleep(WORDS_TAKE_S)
        send(self, message)

    Engine.step = step_or_stop  # type: ignore[method-assign]
    RankChannel.send = send_late  # type: ignore[method-assign]
