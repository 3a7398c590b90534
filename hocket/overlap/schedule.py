"""In which order the stages of alternating ubatches are launched, as data. Knows no tensors and runs nothing.

A schedule is what one ubatch does in one sparse layer, with the points at which it hands over; ubatches take turns
round and round, ubatch 0 first. The executor follows it, `launch_order` tells what comes of it, `explain` prints it.

Every ubatch hands over equally often in a layer, and never between writing keys and values and reading them (A0, A1).
So in every layer ubatch i's cache writes come before ubatch i + 1's attention: a request cut in two depends on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hocket.trace.spans import Stage

_CHAIN = (Stage.QKV, Stage.ATTENTION, Stage.DISPATCH, Stage.EXPERTS, Stage.COMBINE)
_COMM = (Stage.DISPATCH, Stage.COMBINE)
_SENT = {Stage.DISPATCH: Stage.ATTENTION, Stage.COMBINE: Stage.EXPERTS}
"""What a transfer sends the results of."""
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One sparse layer of one ubatch. Raises ValueError for an order that cannot work or that could change answers."""

    name: str
    layer: tuple[Stage, ...]

    def __post_init__(self) -> None:
        stages = tuple(stage for stage in self.layer if stage not in (Stage.SHARED, Stage.HAND_OVER))
        if stages != _CHAIN or self.layer[:2] != _CHAIN[:2]:
            raise ValueError(f"{self.name}: stages must come as {' '.join(_CHAIN)}, A0 and A1 without a hand-over")
        if self.layer.count(Stage.SHARED) != 1:
            raise ValueError(f"{self.name}: the shared experts must run once")

    @property
    def in_moe(self) -> tuple[Stage, ...]:
        """The part that the sparse layer runs: everything after attention."""
        return self.layer[2:]


LAUNCH_FIRST = Schedule(
    "launch, then hand over",
    (
        Stage.QKV, Stage.ATTENTION, Stage.DISPATCH, Stage.HAND_OVER,
        Stage.EXPERTS, Stage.COMBINE, Stage.SHARED, Stage.HAND_OVER,
    ),
)  # fmt: skip
"""Where launching returns at once: a transfer runs as early as it can, under the next ubatch's compute."""

HAND_OVER_FIRST = Schedule(
    "hand over, then launch",
    (
        Stage.QKV, Stage.ATTENTION, Stage.HAND_OVER, Stage.DISPATCH, Stage.EXPERTS,
        Stage.HAND_OVER, Stage.COMBINE, Stage.SHARED, Stage.HAND_OVER,
    ),
)  # fmt: skip
"""Where launching makes the host wait: the other ubatch's compute must be queued before."""

_CHOICE = {
    ("prefill", False): LAUNCH_FIRST,
    ("decode", False): LAUNCH_FIRST,
    ("prefill", True): HAND_OVER_FIRST,
    ("decode", True): HAND_OVER_FIRST,
}
PHASES = ("prefill", "decode")


def choose(phase: str, *, launch_blocks: bool, has_own_thread: bool) -> Schedule:
    """The schedule of a step. phase: "decode" if every working rank has only decodes of one length, else "prefill",
    the same on all ranks; launch_blocks: whether launching a transfer makes its thread wait; has_own_thread: whether
    that is one of the transfers' lane, so that compute goes on."""
    return _CHOICE[phase, launch_blocks and not has_own_thread]


@dataclass(frozen=True, slots=True)
class Launch:
    """One stage of a ubatch in a layer, when its launch comes; part: "send" or "recv" of communication."""

    stage: Stage
    ubatch: int
    layer: int
    part: str = ""

    def text(self, first_layer: int = 0) -> str:
        """Such as D₀ send, or A0₁⁺ in the layer after `first_layer`."""
        plus = "⁺" * (self.layer - first_layer)
        return f"{self.stage}{str(self.ubatch).translate(_SUBSCRIPTS)}{plus} {self.part}".rstrip()


def launch_order(
    schedule: Schedule, *, num_ubatches: int, num_layers: int, is_apart: bool, has_shared: bool
) -> list[Launch]:
    """The launches of a step of `num_layers` sparse layers, in order.

    is_apart: whether the transport's send and receive are apart; has_shared: whether there are shared experts.
    """
    order: list[Launch] = []
    due: dict[int, Launch] = {}  # by ubatch, the receive of its last send that nobody has launched yet
    hooks: list[list[int]] = [[] for _ in range(num_ubatches)]  # whose receives it launches
    alive = list(range(num_ubatches))

    def receive(owner: int) -> None:
        if owner in due:
            order.append(due.pop(owner))

    def run_hooks(ubatch: int) -> None:
        for owner in hooks[ubatch]:
            receive(owner)
        hooks[ubatch].clear()

    def turns(ubatch: int) -> Iterator[None]:
        for layer in range(num_layers):
            for stage in schedule.layer:
                if stage in _COMM:
                    run_hooks(ubatch)
                    order.append(Launch(stage, ubatch, layer, "send"))
                    if is_apart:
                        due[ubatch] = Launch(stage, ubatch, layer, "recv")
                elif stage is Stage.HAND_OVER:
                    following = alive[(alive.index(ubatch) + 1) % len(alive)]
                    if following == ubatch:
                        receive(ubatch)
                    else:
                        hooks[following].append(ubatch)
                    yield
                elif stage is not Stage.SHARED or has_shared:
                    if stage is Stage.EXPERTS:
                        receive(ubatch)  # what they compute with must be here
                    order.append(Launch(stage, ubatch, layer))
            receive(ubatch)
        run_hooks(ubatch)

    running = {ubatch: turns(ubatch) for ubatch in range(num_ubatches)}
    while alive:
        for ubatch in tuple(alive):
            if next(running[ubatch], alive) is alive:
                alive.remove(ubatch)
    return order


def hidden_under(order: Sequence[Launch]) -> list[tuple[Launch, list[Launch]]]:
    """Each transfer with the compute that can go on while it has the comm lane: what is queued behind the compute whose
    results it sends, up to that of the next transfer. Where launching a transfer makes the host wait, some of it must
    be queued before.
    """
    sends = [launch for launch in order if launch.part == "send"]
    compute = [launch for launch in order if launch.stage not in _COMM]
    place = {launch: idx for idx, launch in enumerate(compute)}
    begins = [place[Launch(_SENT[send.stage], send.ubatch, send.layer)] + 1 for send in sends]
    ends = [*begins[1:], len(compute)]
    return [(send, compute[begin:end]) for send, begin, end in zip(sends, begins, ends, strict=True)]
