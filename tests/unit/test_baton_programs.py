"""Random programs of yields, hooks, transfers and failures against an independent model of the order; both batons."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hocket.overlap.executor import EXECUTORS
from hocket.overlap.thread_state import make_baton
from hocket.trace.spans import Stage
from hocket.ubatch import context as ubatch
from hocket.ubatch.baton import Baton
from hocket.ubatch.context import UBatchContext
from hocket.ubatch.lanes import InlineLane
from hocket.ubatch.transfer import Running, Transfer

NUM_PROGRAMS = 10_000
"""Per executor."""
LIMIT_S = 20.0
YIELD, LEAVE_HOOK, TRANSFER, FAIL = "yield", "hook", "transfer", "fail"
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """What a ubatch does next. has_receive: of a transfer, whether its second half is left to the next ubatch."""

    kind: str
    has_receive: bool = False


def random_programs(draw: random.Random) -> list[list[Op]]:
    """One to four ubatches of up to six operations; one in five fails somewhere."""
    programs = []
    for _ in range(draw.randint(1, 4)):
        kinds = draw.choices((YIELD, LEAVE_HOOK, TRANSFER), k=draw.randint(0, 6))
        program = [Op(kind, draw.random() < 0.5) for kind in kinds]
        if draw.random() < 0.2:
            program.insert(draw.randint(0, len(program)), Op(FAIL))
        programs.append(program)
    return programs


def expected(programs: list[list[Op]]) -> list[Event]:
    """The order of events, by stepping through the programs one ubatch after the other. No code of Hocket's."""
    log: list[Event] = []
    waiting: list[list[Event]] = [[] for _ in programs]  # hooks, by the ubatch that must run them
    rests = [list(enumerate(program)) for program in programs]
    owed: list[Event | None] = [None] * len(programs)  # what a ubatch logs when it is its turn again
    alive = list(range(len(programs)))
    at = 0
    while alive:
        me = alive[at]
        if owed[me] is not None:
            receive = ("recv", *owed[me][1:])  # type: ignore[index]
            for hooks in waiting:
                if receive in hooks:  # nobody has launched it, and now it is needed
                    hooks.remove(receive)
                    log.append(receive)
            log.append(owed[me])  # type: ignore[arg-type]
            owed[me] = None
        hands_over = False
        while rests[me] and not hands_over:
            number, op = rests[me].pop(0)
            if op.kind == FAIL:
                log.append(("fail", me, number))
                rests[me] = []
                break
            event: Event | None = None
            if op.kind == TRANSFER:
                log += waiting[me]
                waiting[me] = []
                log.append(("send", me, number))
                owed[me] = ("result", me, number)
                event = ("recv", me, number) if op.has_receive else None
            elif op.kind == LEAVE_HOOK:
                event = ("hook", me, number)
            if len(alive) > 1:
                hands_over = True
                if event:
                    waiting[alive[(at + 1) % len(alive)]].append(event)
            else:
                log += [event] if event else []
                log += [owed[me]] if owed[me] else []  # type: ignore[list-item]
                owed[me] = None
        if hands_over:
            at = (at + 1) % len(alive)
        else:
            log += waiting[me]
            waiting[me] = []
            log.append(("left", me))
            alive.pop(at)
            at = at % len(alive) if alive else 0
    return log


def really(baton: Baton, programs: list[list[Op]]) -> tuple[list[Event], list[Any]]:
    """The same programs on contexts, transfers and a baton; and what each returned or raised."""
    log: list[Event] = []
    lane = InlineLane()
    contexts: list[UBatchContext] = []
    for idx in range(len(programs)):
        contexts.append(UBatchContext(idx, baton, lane, contexts))

    def note(*event: Any) -> Callable[[], None]:
        return lambda: log.append(event)

    def body_of(idx: int) -> Callable[[], int]:
        def body() -> int:
            ubatch.enter(contexts[idx])
            try:
                for number, op in enumerate(programs[idx]):
                    run_op(op, idx, number)
            finally:
                contexts[idx].run_hooks()
                ubatch.enter(None)
                log.append(("left", idx))
            return 10 * idx

        return body

    def run_op(op: Op, idx: int, number: int) -> None:
        if op.kind == FAIL:
            log.append(("fail", idx, number))
            raise ValueError(f"{idx} {number}")
        if op.kind == TRANSFER:
            receive = note("recv", idx, number) if op.has_receive else None
            transfer = Transfer(note("send", idx, number), note("result", idx, number), int, receive)
            running = Running(transfer, Stage.DISPATCH)
            running.hand_over()
            running.finish(Stage.EXPERTS)
        else:
            ubatch.hand_over(note("hook", idx, number) if op.kind == LEAVE_HOOK else None)

    outcomes = baton.run([body_of(idx) for idx in range(len(programs))])
    assert not any(context.hooks for context in contexts)
    return log, [str(outcome.error) if outcome.error else outcome.value for outcome in outcomes]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_random_programs(executor: str) -> None:
    """Hand-overs alternate, hooks run once: before the next transfer of the ubatch that holds them or as it leaves."""
    baton = make_baton(executor, 4, LIMIT_S, torch.device("cpu"))
    draw = random.Random(1)
    seen: set[str] = set()
    for _ in range(NUM_PROGRAMS):
        programs = random_programs(draw)
        log, results = really(baton, programs)
        assert log == expected(programs), programs
        for idx, program in enumerate(programs):
            fails = next((number for number, op in enumerate(program) if op.kind == FAIL), None)
            assert results[idx] == (10 * idx if fails is None else f"{idx} {fails}")
        ran = [event for event in log if event[0] in ("hook", "recv")]
        assert len(ran) == len(set(ran))
        seen |= {event[0] for event in log}
    assert seen == {"send", "recv", "result", "hook", "fail", "left"}
    baton.close()
