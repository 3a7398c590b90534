"""What the front and the ranks say to each other. Typed, encoded with msgpack; nothing is ever unpickled."""

from __future__ import annotations

from typing import Any

import msgspec

from hocket.config.engine import EngineConfig
from hocket.outputs import TokenOutput
from hocket.request import EngineRequest, FinishReason
from hocket.trace.spans import Step

KEY_MARK = "?key="
"""Between the endpoint and the public key in the address of an encrypted front."""


class ToRank(msgspec.Struct, tag=True):
    """Base of what the front sends."""


class Configure(ToRank):
    """Build an engine (in place of the one there was)."""

    config: EngineConfig


class AddRequests(ToRank):
    requests: list[EngineRequest]


class Abort(ToRank):
    """End requests. `reason` is what the user sees: "stop" where the front found a stop string."""

    request_ids: list[str]
    reason: FinishReason = "abort"


class Wake(ToRank):
    """Start stepping: some rank has work. `wave` counts the times that all ranks went to sleep."""

    wave: int


class GetStats(ToRank):
    """Ask for a Stats message; `reset` starts the counters anew."""

    reset: bool = False


class GetCounters(ToRank):
    """Ask for a Counters message. The first one begins to sample the load of experts."""


class CountKernels(ToRank):
    """Count the kernels of coming steps in which every rank has `num_tokens` tokens; Stats will have the number.

    phase: "decode", or "prefill" for all other steps.
    """

    phase: str
    num_tokens: int


class TimeReplays(ToRank):
    """Replay the CUDA graph of `size` rows in so many ubatches `count` times, back to back and over what its last step
    left; Stats will have the µs of one. For all ranks at once, none of which may have requests. Prefixes are forgotten:
    a replay writes to the blocks of that step, which may hold something else by now."""

    size: int
    count: int
    num_ubatches: int = 1


class SetThresholds(ToRank):
    """From the next wave on split steps of so many tokens and more. For all ranks at once; nobody may have requests."""

    decode: int
    prefill: int


class TimeLanes(ToRank):
    """Time the compute and the communication of a step each alone, whole and in ubatches; Lanes is the answer. For all
    ranks at once, none of which may have requests. Prefixes are forgotten: the step writes to their blocks.

    A step of `num_tokens` tokens on every rank. phase: "decode" at contexts of `length` tokens, with the rows of the
    CUDA graph that it would replay, or "prefill" of prompts of `length`. repeats: so many times in turn. count: steps
    that one figure goes over.
    """

    phase: str
    num_tokens: int
    length: int
    repeats: int
    count: int


class RecordSteps(ToRank):
    """Record the spans of `num_steps` steps after the next `skip`, of `phase` ("": of any), and drop earlier ones."""

    num_steps: int
    skip: int = 0
    phase: str = ""


class GetSpans(ToRank):
    """Ask for a Spans message, and record no more."""


class RecordStates(ToRank):
    """From now on keep the hidden states of every layer; requests get the tokens `forced` says, by request, instead of
    those that are sampled for them."""

    forced: dict[str, list[int]]


class GetStates(ToRank):
    """Ask for the States of a layer."""

    layer: int


class Shutdown(ToRank):
    """End the process."""


class FromRank(msgspec.Struct, tag=True):
    """Base of what a rank sends."""

    rank: int


class Hello(FromRank):
    """The process runs and is about to join its group."""

    pid: int


class Progress(FromRank):
    """How far a long start-up phase has come."""

    phase: str
    done: int
    total: int


class Ready(FromRank):
    """The engine is built. `info`: what the start-up summary prints."""

    info: dict[str, Any]


class StepOutputs(FromRank):
    """What a step gave; sent only when there is something to say."""

    outputs: list[TokenOutput]


class StepFailed(FromRank):
    """A step's results were worthless; the requests ended. is_cause: it failed on this rank."""

    message: str
    is_cause: bool
    request_ids: list[str]


class NeedWake(FromRank):
    """This rank has work but all ranks went to sleep after wave `wave - 1`."""

    wave: int


class Stats(FromRank):
    """Step counters since the start or the last reset."""

    stats: dict[str, Any]


class Counters(FromRank):
    """Sums only, of steps and of the scheduler, quick to tell while steps run; and the load of experts, where a sample
    was taken."""

    stats: dict[str, Any]


class Spans(FromRank):
    """The steps recorded, in order; their times are those of the rank's time.perf_counter_ns."""

    steps: list[Step]


class Lanes(FromRank):
    """µs of each repeat by what was timed: "compute", "compute_halves", "comm", "comm_halves", "output". bytes: what
    this rank sends in a step, by "comm", "comm_halves". captured: whether all of it ran in CUDA graphs."""

    us: dict[str, list[float]]
    bytes: dict[str, int]
    captured: bool


class StateRow(msgspec.Struct, array_like=True, frozen=True):
    """A token that went through the model: its request, its position, and in which part of which step (from 0)."""

    request_id: str
    position: int
    step: int
    phase: str
    ubatch: int
    num_ubatches: int


class States(FromRank):
    """A layer's hidden states. values: fp32 [2, rows, hidden_size], what attention gave and what the layer gave."""

    layer: int
    rows: list[StateRow]
    hidden_size: int
    values: bytes


class Failed(FromRank):
    """This rank ends. `kind` is the error's class name, `message` one line for the user."""

    kind: str
    message: str
    details: str


RankMessage = (
    Hello | Progress | Ready | StepOutputs | StepFailed | NeedWake | Stats | Counters | Spans | Lanes | States | Failed
)
FrontMessage = (
    Configure
    | AddRequests
    | Abort
    | Wake
    | GetStats
    | GetCounters
    | CountKernels
    | SetThresholds
    | TimeReplays
    | TimeLanes
    | RecordSteps
    | GetSpans
    | RecordStates
    | GetStates
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_front_decoder = msgspec.msgpack.Decoder(FrontMessage)
_rank_decoder = msgspec.msgpack.Decoder(RankMessage)


def encode(message: ToRank | FromRank) -> bytes:
    """The message as msgpack bytes."""
    return _encoder.encode(message)


def decode_for_rank(raw: bytes) -> FrontMessage:
    """A message from the front; raises msgspec.DecodeError on anything else."""
    return _front_decoder.decode(raw)


def decode_for_front(raw: bytes) -> RankMessage:
    """A message from a rank; raises msgspec.DecodeError on anything else."""
    return _rank_decoder.decode(raw)
