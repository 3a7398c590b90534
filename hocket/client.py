"""The front's view of a running engine: adds requests to ranks, turns what they report into results. Torch-free.

Knows which rank has which request; knows nothing of how ranks work or of how results are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hocket.balance import Balance
from hocket.channel.messages import (
    Abort,
    AddRequests,
    Counters,
    GetCounters,
    GetSpans,
    GetStates,
    GetStats,
    Lanes,
    RankMessage,
    RecordStates,
    RecordSteps,
    SetThresholds,
    Spans,
    States,
    Stats,
    StepFailed,
    StepOutputs,
    TimeLanes,
    ToRank,
)
from hocket.config.engine import EngineConfig
from hocket.dist.launcher import RankGroup
from hocket.errors import ConfigError, RankLost, UBatchFailed
from hocket.outputs import RequestOutput, TokenOutput
from hocket.processor import Processor
from hocket.request import EngineRequest, FinishReason, SamplingParams
from hocket.trace.spans import Step


class Listener(Protocol):
    """Is told what becomes of engine requests (a prompt is `params.n` of them), and what ranks count."""

    def added(self, rank: int, request: EngineRequest, arrived_at: float, num_known: int) -> None:
        """A request goes to `rank`, which is thought to have `num_known` tokens of its prompt in its cache; it came to
        the front at `arrived_at` (time.monotonic)."""

    def gained(self, output: TokenOutput, now: float) -> None:
        """A request got tokens."""

    def ended(self, request_id: str, reason: str, now: float) -> None:
        """A request is over: "stop", "length", "abort" or "error". Told once for each request added."""

    def counted(self, stats: dict[str, Any]) -> None:
        """A rank's answer to `ask_counters`."""


Answer = TypeVar("Answer", Stats, Spans, Lanes, States)
_SILENCE_GRACE_S = 5.0
_CHECK_SILENCE_S = 0.5


@dataclass(frozen=True)
class FailedStep:
    """A step whose results were worthless, and the user's requests that lost a completion by it. is_cause: it failed on
    the rank that reports it; the other ranks report the same step."""

    message: str
    is_cause: bool
    requests: list[RequestOutput]


class EngineClient:
    """Requests in, RequestOutputs out, over a configured RankGroup.

    balance: which rank gets a request without one, at first by the fewest requests; another one may be set before any
    request is added.
    """

    def __init__(self, config: EngineConfig, group: RankGroup, processor: Processor) -> None:
        self.config = config
        self.group = group
        self.processor = processor
        self.balance = Balance(len(group.ranks), first_rank=group.ranks[0])
        self._silence_checked_at = 0.0
        self.listener: Listener | None = None
        self.on_spans: Callable[[Spans], None] | None = None
        """Gets what `ask_spans` asked for."""

    @property
    def has_unfinished(self) -> bool:
        return bool(self.balance.placed)

    def add(self, request_id: str, prompt: Any, params: SamplingParams | None = None, rank: int | None = None) -> None:
        """Queue one prompt, on `rank` or on the one with the least to do.

        Raises:
            ConfigError, CapacityError: the prompt or the parameters cannot be served.
        """
        self.add_many([(request_id, prompt, params, rank)])

    def add_many(self, items: Sequence[tuple[str, Any, SamplingParams | None, int | None]]) -> None:
        """Queue several prompts so that each rank learns of its share at once; all or none."""
        arrived_at = time.monotonic()
        made: list[tuple[EngineRequest, int | None]] = []
        added: list[str] = []
        try:
            for request_id, prompt, params, rank in items:
                self._check_rank(rank)
                made += [(request, rank) for request in self.processor.add(request_id, prompt, params)]
                added.append(request_id)
            by_rank: dict[int, list[EngineRequest]] = {}
            for request, rank in made:
                placed = self.balance.place(request, rank)
                by_rank.setdefault(placed.rank, []).append(request)
                if self.listener is not None:
                    self.listener.added(placed.rank, request, arrived_at, placed.num_known)
            for to_rank, requests in by_rank.items():
                self.group.send(to_rank, AddRequests(requests=requests))
        except BaseException:
            self.abort(added)
            raise

    def _check_rank(self, rank: int | None) -> None:
        wrong_type = not isinstance(rank, int) or isinstance(rank, bool)
        if rank is not None and (wrong_type or rank not in self.group.ranks):
            allowed = f"a whole number from {self.group.ranks[0]} to {self.group.ranks[-1]}"
            raise ConfigError("data_parallel_rank", rank, allowed)

    def _ended(self, engine_request_id: str, reason: str) -> None:
        if self.balance.ended(engine_request_id, reason) is not None and self.listener is not None:
            self.listener.ended(engine_request_id, reason, time.monotonic())

    def poll(self, timeout_s: float) -> list[RequestOutput]:
        """Results that changed, each as it is now; waits up to `timeout_s` for the first.

        Raises:
            HocketError: a rank failed, ended or fell silent; every request is lost then.
        """
        changed, failed = self.advance(timeout_s)
        _raise_cause(failed)
        return changed

    def advance(self, timeout_s: float) -> tuple[list[RequestOutput], list[FailedStep]]:
        """As `poll`, but steps that failed are returned, with the requests they cost, so that the others can go on."""
        messages = self.group.receive(timeout_s)
        now = time.monotonic()
        if now > self._silence_checked_at + _CHECK_SILENCE_S:
            self._silence_checked_at = now
            self._check_silence(now)
        return self._process(messages)

    def _process(self, messages: Iterable[RankMessage]) -> tuple[list[RequestOutput], list[FailedStep]]:
        changed: dict[str, RequestOutput] = {}
        failed: list[FailedStep] = []
        now = time.monotonic()
        for message in messages:
            if isinstance(message, StepFailed):
                failed.append(self._fail(message))
            if isinstance(message, Counters) and self.listener is not None:
                self.listener.counted(message.stats)
            elif isinstance(message, Spans) and self.on_spans is not None:
                self.on_spans(message)
            if not isinstance(message, StepOutputs):
                continue
            for output in message.outputs:
                result = self.processor.process(output)
                if self.listener is not None:
                    self.listener.gained(output, now)
                self.balance.computed(output)
                if output.finish_reason is not None:
                    self._ended(output.request_id, output.finish_reason)
                if result is not None:
                    changed[result.request_id] = result
        self._tell_ended(self.processor.take_aborts(), "stop")
        return list(changed.values()), failed

    def _fail(self, message: StepFailed) -> FailedStep:
        """Drop the requests of a failed step."""
        lost: dict[str, RequestOutput] = {}
        for engine_id in message.request_ids:
            self._ended(engine_id, "error")
            output = self.processor.drop(engine_id)
            if output is not None:
                lost[output.request_id] = output
        return FailedStep(message.message, message.is_cause, list(lost.values()))

    def _check_silence(self, now: float) -> None:
        limit = self.config.step_timeout_s + _SILENCE_GRACE_S
        for rank, load in enumerate(self.balance.loads, self.group.ranks[0]):
            if load.num_requests and now - max(self.group.last_heard[rank], load.busy_since) > limit:
                error = RankLost(f"rank {rank} has said nothing for {limit:g} s, longer than a step may take")
                self.group.kill(str(error))
                raise error

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their RequestOutputs finish with the reason "abort". Unknown ids are ignored."""
        engine_ids = [engine_id for request_id in request_ids for engine_id in self.processor.abort(request_id)]
        self._tell_ended(engine_ids, "abort")

    def _tell_ended(self, engine_ids: Iterable[str], reason: FinishReason) -> None:
        by_rank: dict[int, list[str]] = {}
        for engine_id in engine_ids:
            placed = self.balance.placed.get(engine_id)
            if placed is not None:
                by_rank.setdefault(placed.rank, []).append(engine_id)
                self._ended(engine_id, reason)
        for rank, ids in by_rank.items():
            self.group.send(rank, Abort(request_ids=ids, reason=reason))

    def num_requests_per_rank(self) -> list[int]:
        """Unfinished requests of each rank of the group."""
        return [load.num_requests for load in self.balance.loads]

    def num_tokens_per_rank(self) -> list[int]:
        """Tokens that the unfinished requests of each rank are expected to need computed."""
        return [load.num_tokens for load in self.balance.loads]

    def stats(self, *, reset: bool = False) -> list[dict[str, Any]]:
        """Step counters of every rank, by rank; call it while nothing is being generated."""
        return [message.stats for message in self._ask(GetStats(reset=reset), Stats, "its counters")]

    def ask_counters(self) -> None:
        """Have every rank tell the listener its sums (`StepStats.totals`, the scheduler's, expert load), also while it
        works; the answers come in with `poll`."""
        self.group.broadcast(GetCounters())

    def record_steps(self, num_steps: int, *, skip: int = 0, phase: str = "") -> None:
        """Have every rank record `num_steps` steps after the next `skip`, of `phase` ("prefill", "decode", "": any)."""
        self.group.broadcast(RecordSteps(num_steps=num_steps, skip=skip, phase=phase))

    def recorded_steps(self) -> list[list[Step]]:
        """What every rank has recorded, by rank; call it while nothing is being generated. Recording ends."""
        return [message.steps for message in self._ask(GetSpans(), Spans, "what it recorded")]

    def ask_spans(self) -> None:
        """As `recorded_steps`, without waiting: `on_spans` gets them, also while ranks work."""
        self.group.broadcast(GetSpans())

    def set_thresholds(self, decode: int, prefill: int) -> None:
        """Have all ranks split steps of so many tokens and more; call it while nothing is being generated."""
        self.group.broadcast(SetThresholds(decode=decode, prefill=prefill))

    def time_lanes(self, asked: TimeLanes, limit_s: float) -> list[Lanes]:
        """Every rank's times of compute and communication alone, by rank; call it while nothing is being generated."""
        return self._ask(asked, Lanes, "the times of its lanes", limit_s)

    def record_states(self, forced: dict[str, list[int]]) -> None:
        """Have every rank keep the hidden states of what it computes from now on; `forced`: tokens by engine request,
        given to it instead of those that are sampled."""
        self.group.broadcast(RecordStates(forced=forced))

    def states(self, layer: int) -> list[States]:
        """What every rank kept of a layer, by rank; call it while nothing is being generated."""
        return self._ask(GetStates(layer=layer), States, f"the states of layer {layer}")

    def _ask(self, question: ToRank, kind: type[Answer], what: str, limit_s: float | None = None) -> list[Answer]:
        """Every rank's answer, by rank. Raises RankLost where one does not answer within limit_s (None: as a step)."""
        self.group.broadcast(question)
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + (limit_s or self.config.step_timeout_s) + _SILENCE_GRACE_S
        while len(found) < len(self.group.ranks):
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in self.group.ranks if rank not in found)
                raise RankLost(f"rank {missing} did not report {what}")
            messages = self.group.receive(0.1)
            found |= {message.rank: message for message in messages if isinstance(message, kind)}
            _, failed = self._process(messages)
            _raise_cause(failed)
        return [found[rank] for rank in self.group.ranks]


def _raise_cause(failed: Iterable[FailedStep]) -> None:
    """Raise what a failed step's own rank says; it reports before the others do."""
    for step in failed:
        if step.is_cause:
            raise UBatchFailed(step.message)
