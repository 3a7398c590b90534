"""The process of one rank: joins the group, takes orders from the front, steps the engine. Knows no tokenizer."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch

from hocket.channel.messages import (
    Abort,
    AddRequests,
    Configure,
    Failed,
    FrontMessage,
    Hello,
    NeedWake,
    Progress,
    Ready,
    Shutdown,
    StepFailed,
    StepOutputs,
    Wake,
)
from hocket.channel.rank import RankChannel
from hocket.config.engine import EngineConfig
from hocket.dist.processes import end_with_parent, key_of_front
from hocket.dist.record import RESTS
from hocket.dist.watchdog import Watchdog, time_limit
from hocket.dist.world import Place, World
from hocket.engine import Engine
from hocket.envs import set_up_logging
from hocket.errors import BatonTimeout, HocketError, RankLost
from hocket.observe import Observer
from hocket.startup import PROCESSES, RENDEZVOUS, Phases, process_began

logger = logging.getLogger(__name__)
_FRONT_KEY = "front"
_SIGN_OF_LIFE_S = 1.0
"""A stepping rank says something at least this often (long prefills have no outputs for many steps)."""


class RankProcess:
    """Takes messages and steps the engine until it is told to stop. phases: of its start, for the first engine."""

    def __init__(self, channel: RankChannel, world: World, phases: Phases) -> None:
        self._phases: Phases | None = phases
        self.channel = channel
        self.world = world
        self.rank = world.place.rank
        self.engine: Engine | None = None
        self._watchdog: Watchdog | None = None
        self._observer: Observer | None = None
        self.lock_step = False
        self.running = True
        self._wave = 1  # the wave this rank is in, or sleeps before
        self._woken_wave = 0  # the latest the front has announced
        self._asked_wave = 0
        self._spoke_at = 0.0

    def run(self) -> None:
        """Serve until Shutdown. Raises what ends the rank."""
        while self.running:
            for message in self.channel.receive(block=self._sleeps()):
                self._handle(message)
            if self.running and self.engine is not None and not self._sleeps():
                self._step(self.engine)

    def _sleeps(self) -> bool:
        if self.engine is None:
            return True
        if not self.lock_step:
            return not self.engine.has_work
        return self._woken_wave < self._wave

    def _step(self, engine: Engine) -> None:
        outputs, plan = engine.step()
        self.world.record.enter(RESTS)
        if self._observer is not None:
            self._observer.step(plan)
        now = time.monotonic()
        if outputs or now > self._spoke_at + _SIGN_OF_LIFE_S:
            self._spoke_at = now
            self.channel.send(StepOutputs(rank=self.rank, outputs=outputs))
        failure = engine.take_failure()
        if failure is not None:
            self.channel.send(
                StepFailed(
                    rank=self.rank,
                    message=failure.message,
                    is_cause=failure.is_cause,
                    request_ids=failure.request_ids,
                )
            )
        if self.lock_step and plan.is_finished:  # the same on all ranks: all go to sleep after this step
            self._wave += 1
            self._rest()
            self._ask_wake(engine)
        elif not self.lock_step and not engine.has_work:
            self._rest()

    def _rest(self) -> None:
        """All ranks sleep, or are about to: what was asked for such a time is done."""
        if self._observer is not None:
            for answer in self._observer.rest():
                self.channel.send(answer)
            self.world.record.enter(RESTS)

    def _ask_wake(self, engine: Engine) -> None:
        if engine.has_work and self.lock_step and self._woken_wave < self._wave and self._asked_wave < self._wave:
            self._asked_wave = self._wave
            self.channel.send(NeedWake(rank=self.rank, wave=self._wave))

    def _drain(self) -> None:
        """End this rank's requests and step with the others until all sleep: nobody may leave a wave early."""
        if self.engine is not None:
            self.engine.abort_all()
            while not self._sleeps():
                self._step(self.engine)
            self.engine.close()
            self.engine = None
            gc.unfreeze()
        self._observer = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def _handle(self, message: FrontMessage) -> None:
        if isinstance(message, Configure | Shutdown):
            self._drain()
            self.running = isinstance(message, Configure)
            if isinstance(message, Configure):
                self._configure(message.config)
            return
        engine, observer = self.engine, self._observer
        if engine is None or observer is None:
            raise HocketError(f"rank {self.rank} was sent {type(message).__name__} before it was configured")
        order = self.ORDERS.get(type(message))
        if order is not None:
            order(self, engine, message)
            return
        answer = observer.answer(message)
        if answer is not None:
            self.channel.send(answer)
        if self._sleeps():
            self._rest()

    def _add(self, engine: Engine, message: AddRequests) -> None:
        engine.add(message.requests)
        self._ask_wake(engine)

    def _abort(self, engine: Engine, message: Abort) -> None:
        engine.abort(message.request_ids, message.reason)

    def _woken(self, _engine: Engine, message: Wake) -> None:
        self._woken_wave = max(self._woken_wave, message.wave)

    ORDERS: ClassVar[dict[type, Callable[[RankProcess, Engine, Any], None]]] = {
        AddRequests: _add,
        Abort: _abort,
        Wake: _woken,
    }
    """What concerns work; the other messages are questions for the engine's observer."""

    def _configure(self, config: EngineConfig) -> None:
        phases, self._phases = self._phases or Phases(), None
        self._wave += 1  # on all ranks: a wake that was asked for before must not start some of them early
        self.lock_step = config.parallel.enable_expert_parallel
        device = self.world.place.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = self.world.mesh(
            expert_parallel=self.lock_step,
            device=device,
            step_timeout_s=config.step_timeout_s,
            max_ctas=config.parallel.max_nccl_ctas,
        )
        exchange = self.world.exchange(
            lock_step=self.lock_step, timeout_s=config.step_timeout_s, connect_timeout_s=config.startup_timeout_s
        )
        phases.end(RENDEZVOUS)
        with torch.inference_mode():
            self.engine = Engine(config, mesh, exchange, self._progress, partial(self._limit, config))
        self._observer = Observer(self.engine, self.rank, partial(self._limit, config))
        gc.collect()
        gc.freeze()  # else a full collection, in the middle of serving, looks through all of it for some 100 ms
        self._watchdog = Watchdog(self.world.record, config.step_timeout_s, partial(self._end, self._stuck))
        info = self.engine.runner.info()
        info["startup_s"] = phases.seconds | info["startup_s"]
        logger.info("engine built: %s", info)
        self.channel.send(Ready(rank=self.rank, info=info))

    def _limit(self, config: EngineConfig, what: str) -> AbstractContextManager[None]:
        """Ends this rank, with a message, if what is done inside takes longer than a graph's capture may."""
        limit_s = config.graphs.capture_timeout_s

        def late() -> Failed:
            message = f"{what} took more than {limit_s:g} s: raise --capture-timeout, or run with --enforce-eager"
            return self._failed(BatonTimeout, message, _stack_of(None))

        return time_limit(limit_s, partial(self._end, late))

    def _end(self, report: Callable[[], Failed]) -> None:
        """On a thread that watches: say what keeps this rank and end, for nothing else will."""
        try:
            self.channel.send_from_other_thread(report())
        finally:
            os._exit(1)

    def _stuck(self) -> Failed:
        """The step does not get on."""
        assert self.engine is not None
        ubatch, thread = self.engine.runner.executor.holder
        limit_s = self.engine.config.step_timeout_s
        stack = _stack_of(thread)
        if self.engine.runner.waits_for_device:  # a graph's collectives have no limit of their own
            why = "another rank is late or gone, or a kernel hangs"
            return self._failed(RankLost, f"its device has not ended a step for {limit_s:g} s: {why}", stack)
        place = f"{stack[-1].name} ({os.path.basename(stack[-1].filename)}:{stack[-1].lineno})"
        who = "it" if ubatch < 0 else f"ubatch {ubatch}"
        message = f"{who} has computed for {limit_s:g} s without getting on, in {place}"
        return self._failed(BatonTimeout, message, stack)

    def _failed(self, kind: type[HocketError], message: str, stack: traceback.StackSummary) -> Failed:
        return Failed(rank=self.rank, kind=kind.__name__, message=message, details="".join(stack.format()))

    def _progress(self, phase: str, done: int, total: int) -> None:
        self.channel.send(Progress(rank=self.rank, phase=phase, done=done, total=total))


def _stack_of(thread: int | None) -> traceback.StackSummary:
    """Where a thread is; None: the main one."""
    return traceback.extract_stack(sys._current_frames()[thread or threading.main_thread().ident or 0])


def serve(place: Place, address: str | None, startup_timeout_s: float) -> int:
    """Join the group and serve the front; returns the exit code. A failure is reported before the process ends.

    `address`: the front's; None under torchrun on other ranks than 0, which learn it from the group's store.
    """
    phases = Phases(process_began())
    channel = RankChannel(address, place.rank) if address else None
    try:
        set_up_logging(f"hocket rank {place.rank}")
        world = World(place, startup_timeout_s)
        if place.store_path is None and address:
            world.store.set(_FRONT_KEY, address)
        world.claim()
        channel = channel or RankChannel(world.store.get(_FRONT_KEY).decode(), place.rank)
        channel.send(Hello(rank=place.rank, pid=os.getpid()))
        phases.end(PROCESSES)
        world.join()
        process = RankProcess(channel, world, phases)
        with torch.inference_mode():
            process.run()
        world.close()
    except Exception as error:  # the one place where a rank's failure becomes a message
        kind = type(error).__name__
        line = str(error) if isinstance(error, HocketError) else f"{type(error).__name__}: {error}"
        details = traceback.format_exc()
        logger.debug("rank %d ends:\n%s", place.rank, details)
        if channel is None:
            print(f"rank {place.rank}: {line}", file=sys.stderr)
        else:
            channel.send(Failed(rank=place.rank, kind=kind, message=line.splitlines()[0], details=details))
            channel.close()
        # Peers may be inside a collective with this rank: leave without waiting for them.
        os._exit(3 if isinstance(error, RankLost) else 1)
    channel.close()
    gc.freeze()  # else Python's last collections, before it ends, take half a second for the objects of torch's modules
    return 0


def main() -> int:
    """Entry of a spawned rank: `python -m hocket.start_rank --rank … --address …` (made by the launcher)."""
    parser = argparse.ArgumentParser(description="one rank of a Hocket engine; started by the launcher")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--store", help="file of the group's store; without it torchrun's environment is used")
    parser.add_argument("--store-fd", type=int, help="with torchrun's environment: the socket to serve the store at")
    parser.add_argument("--startup-timeout", type=float, required=True)
    args = parser.parse_args()
    faulthandler.enable()
    folder = os.path.dirname(args.store) if args.store and args.rank == 0 else None
    end_with_parent(folder)
    place = Place.spawned(args.rank, args.world_size, args.store) if args.store else Place.from_torchrun(args.store_fd)
    return serve(place, args.address + key_of_front(), args.startup_timeout)


def join_torchrun(startup_timeout_s: float) -> int:
    """Serve as the rank that torchrun made this process; returns when the front shuts down."""
    return serve(Place.from_torchrun(), None, startup_timeout_s)
