"""No slot of `nvlink_copy` is written while anybody may still read it, and no tensor that it sends is dropped before,
however fast each stream of each rank runs: its own code and the executor's say what is launched, and all pairs of
accesses to the same bytes must be ordered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import MOE
from ordered_streams import Accesses, Device, Noted, NotedDelay, NotedLane, NotedSide, Op, check_capture
from torch import Tensor, nn
from unordered_accesses import Search

from hocket.errors import UBatchFailed
from hocket.moe.base import TokenLayout
from hocket.moe.experts.base import Experts
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.router import Router
from hocket.moe.side import INLINE
from hocket.moe.transport import link_copies, nvlink_copy
from hocket.moe.transport.base import StepSizes, Transport
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.moe.transport.nvlink_copy import NVLinkCopyTransport
from hocket.overlap import executor as executors
from hocket.overlap.executor import UBatchExecutor
from hocket.overlap.schedule import HAND_OVER_FIRST, LAUNCH_FIRST, Schedule
from hocket.worker.kept_transfers import transfers_kept

CPU = torch.device("cpu")
HIDDEN, LAYERS, MOST = 8, 3, 12


class NotedMemory:
    """In place of PeerMemory; `group` is the simulated device that opens it."""

    def __init__(self, num_bytes: int, group: Any, device: torch.device) -> None:
        self._device: Device = group
        for memory in self._device.memories.values():
            if memory.numel() == 0:
                memory.resize_(num_bytes).fill_(0)
        self.of_rank = tuple(self._device.memories.values())

    def signal(self, rank: int, channel: int) -> None:
        self._device.note("signal", rank, channel)

    def wait(self, rank: int, channel: int) -> None:
        self._device.note("await", rank, channel)


class EveryRow(Experts):
    """Reads all that came."""

    name = "every_row"

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x * weights.sum(1, keepdim=True) * ids.sum(1, keepdim=True)


class Shared(nn.Module):
    """Shared experts, whose result is another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Layers(nn.Module):
    """Sparse layers, of which one fails where its input says so."""

    def __init__(self, layers: list[MoELayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Any, *_: Any) -> Tensor:
        x: Tensor = inputs.x
        for number, layer in enumerate(self.layers):
            if inputs.fails_at == number:
                raise RuntimeError("planted")
            x = layer(x, inputs.layout)
        return x


@dataclass(frozen=True)
class Step:
    """rows: of each rank, in each ubatch. fails: (rank, ubatch, layer). has_side: shared experts on another stream."""

    rows: tuple[tuple[int, ...], ...]
    fails: tuple[int, int, int] | None = None
    schedule: Schedule = LAUNCH_FIRST
    has_side: bool = False

    def parts(self, rank: int) -> tuple[Any, ...]:
        """The ubatches' inputs."""
        found = []
        for ubatch, num_rows in enumerate(self.rows[rank]):
            most = max(rows[ubatch] for rows in self.rows)
            layout = TokenLayout.of(num_rows // 2, num_rows, most, CPU)
            fails_at = self.fails[2] if self.fails is not None and self.fails[:2] == (rank, ubatch) else -1
            found.append(SimpleNamespace(x=torch.zeros(num_rows, HIDDEN), layout=layout, fails_at=fails_at))
        return tuple(found)


class Rank:
    """The transport and the executor of a rank, whose streams note what they are given."""

    def __init__(
        self, device: Device, num_ranks: int, num_ubatches: int, patch: pytest.MonkeyPatch, *, has_link: bool
    ) -> None:
        placement = ExpertPlacement(MOE.num_experts, num_ranks)
        self.device = device
        self.transport = NVLinkCopyTransport(placement, device.rank, device, CPU)  # type: ignore[arg-type]
        self.transport.open(
            StepSizes(
                max_tokens=MOST,
                hidden_size=HIDDEN,
                top_k=MOE.top_k,
                dtype=torch.float32,
                num_local_ranks=num_ranks,
                num_ubatches=num_ubatches,
            )
        )
        router = Router(MOE, HIDDEN)
        router.weight.zero_()
        experts = EveryRow(1, HIDDEN, 2, dtype=torch.float32)
        transport: Transport = self.transport
        if has_link:
            patch.setattr(link_copies, "CopyDelay", lambda _: NotedDelay(device))
            transport = LinkEmulator(transport, 12.0, 46.0, torch.device("cuda", 0))
        self.layers = [MoELayer(router, experts, transport, Shared()) for _ in range(LAYERS)]
        patch.setattr(executors, "comm_lane", lambda *_: device.lane())
        self.executor = UBatchExecutor(Layers(self.layers), "greenlet", num_ubatches, 20.0, CPU)  # type: ignore[arg-type]

    def run(self, step: Step) -> None:
        side = NotedSide(self.device) if step.has_side else INLINE
        for layer in self.layers:
            layer.side = side
        self.executor.schedules = {"prefill": step.schedule}
        try:
            self.executor.run(step.parts(self.device.rank), [], "prefill")
        except UBatchFailed:
            assert step.fails is not None

    def noted(self, work: Callable[[], None]) -> None:
        with torch.inference_mode(), Accesses(self.device):
            work()


class World:
    """Ranks that do the same, one after the other: what each launches depends on itself alone."""

    def __init__(self, num_ranks: int, num_ubatches: int, *, has_link: bool = False) -> None:
        self.num_ubatches = num_ubatches
        memories = {rank: torch.empty(0, dtype=torch.uint8) for rank in range(num_ranks)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvlink_copy, "PeerMemory", NotedMemory)
            devices = [Device(rank, memories) for rank in range(num_ranks)]
            self.ranks = [Rank(one, num_ranks, num_ubatches, patch, has_link=has_link) for one in devices]

    def each(self, work: Callable[[Rank], None]) -> None:
        for rank in self.ranks:
            rank.noted(lambda rank=rank: work(rank))  # type: ignore[misc]

    def capture(self, step: Step) -> list[list[Op]]:
        """The graph of each rank."""
        graphs: list[list[Op]] = []
        self.each(lambda rank: graphs.append(rank.device.captured(lambda: rank.run(step))))
        return graphs

    def replay(self, graphs: list[list[Op]]) -> None:
        for rank, graph in zip(self.ranks, graphs, strict=True):
            rank.device.replay(graph)

    def faults(self) -> list[str]:
        return Search([rank.device for rank in self.ranks]).faults


def random_step(draw: random.Random, num_ranks: int, num_ubatches: int) -> Step:
    """Whole or in any number of ubatches, ranks without rows among them; some fail."""
    count = draw.randint(1, num_ubatches)
    most = MOST // count
    rows = tuple(tuple(draw.choice([0, 1, most // 2, most]) for _ in range(count)) for _ in range(num_ranks))
    fails = None
    if draw.random() < 0.3:
        fails = draw.randrange(num_ranks), draw.randrange(count), draw.randrange(LAYERS)
    schedule = draw.choice([LAUNCH_FIRST, HAND_OVER_FIRST])
    return Step(rows, fails, schedule=schedule, has_side=count == 1 and draw.random() < 0.5)


@pytest.fixture(params=[(2, 2), (2, 3), (3, 3)], ids=lambda pair: f"{pair[0]}-ranks-{pair[1]}-ubatches")
def world(request: pytest.FixtureRequest, has_link: bool) -> World:
    return World(*request.param, has_link=has_link)


@pytest.fixture(params=[False, True], ids=["alone", "link"])
def has_link(request: pytest.FixtureRequest) -> bool:
    """Whether an emulated link is around it."""
    return bool(request.param)


@pytest.mark.parametrize("seed", range(2))
def test_steps_and_graphs_in_any_order(world: World, seed: int) -> None:
    """Graphs are captured at other slots than those that their replays come after."""
    draw, num_ranks = random.Random(seed), len(world.ranks)
    graphs: list[list[list[Op]]] = []
    num_replays = 0
    for _ in range(16):
        step = random_step(draw, num_ranks, world.num_ubatches)
        kind = draw.choice(["step", "capture", "replay"])
        if kind == "step":
            world.each(lambda rank, step=step: rank.run(step))  # type: ignore[misc]
        elif kind == "capture" and step.fails is None:
            graphs.append(world.capture(step))
        elif graphs:
            world.replay(draw.choice(graphs))
            num_replays += 1
    assert num_replays >= 2
    assert sum(len(rank.device.ops) for rank in world.ranks) > 500
    assert world.faults() == []


def test_lanes_timed_alone(world: World) -> None:
    """Compute over kept transfers packs rows into slots that the others' transfers alone write to: all ranks meet
    between the two."""
    lanes_alone(world, meet=True)
    assert world.faults() == []


def test_lanes_timed_alone_need_the_ranks_to_meet() -> None:
    world = World(2, 2)
    lanes_alone(world, meet=False)
    assert world.faults()


def lanes_alone(world: World, *, meet: bool) -> None:
    num_ranks = len(world.ranks)
    steps = {"": Step(((MOST,),) * num_ranks), "_halves": Step(((MOST // 3,) * world.num_ubatches,) * num_ranks)}

    def run(rank: Rank) -> None:
        with transfers_kept(rank.layers) as kept:
            for name, step in steps.items():
                kept.select(name, moves=True)
                rank.run(step)
            for turn, (name, moves) in enumerate([*itertools.product(steps, (False, True))] * 2):
                kept.select(name, moves=False)
                if meet:
                    rank.device.note("meet", -1, turn)
                if moves:
                    kept.move(LAYERS)
                else:
                    rank.run(steps[name])
        rank.run(steps[""])

    world.each(run)


def one_slot(world: World, patch: pytest.MonkeyPatch) -> None:
    """The calls of all ubatches take the same."""
    for rank in world.ranks:
        patch.setattr(rank.transport._slots, "count", 1)
        patch.setattr(rank.transport._slots, "begin", lambda: None)


def transfers_ahead_of_compute(world: World, patch: pytest.MonkeyPatch) -> None:
    """Rows are sent before they are packed, and sums before the experts have read the rows."""
    launch = NotedLane.launch
    patch.setattr(NotedLane, "launch", lambda self, work, name, after=None: launch(self, work, name))


def compute_ahead_of_transfers(world: World, patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what comes."""
    patch.setattr(Noted, "wait", lambda self: None)


def nobody_is_told(world: World, patch: pytest.MonkeyPatch) -> None:
    """Of sums that are there."""
    for part in ("signal", "wait"):
        told = getattr(NotedMemory, part)
        patch.setattr(
            NotedMemory, part, lambda self, rank, channel, told=told: channel % 2 or told(self, rank, channel)
        )


def drops_what_it_sends(world: World, patch: pytest.MonkeyPatch) -> None:
    """The host lets go of a copy of the rows as soon as their way is launched."""
    prepare = NVLinkCopyTransport.prepare

    def forgetful(self: NVLinkCopyTransport, x: Tensor, *others: Any) -> Any:
        transfer, held, sink = prepare(self, x, *others), [x.clone()], torch.empty_like(x)

        def send() -> None:
            transfer.send()
            sink.copy_(held.pop())

        return replace(transfer, send=send)

    patch.setattr(NVLinkCopyTransport, "prepare", forgetful)


@pytest.mark.parametrize(
    "break_it", [one_slot, transfers_ahead_of_compute, compute_ahead_of_transfers, nobody_is_told, drops_what_it_sends]
)
def test_what_breaks_the_order_is_found(
    break_it: Callable[[World, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2, 2)
    break_it(world, monkeypatch)
    for _ in range(2):
        world.each(lambda rank: rank.run(Step(((6, 6), (6, 3)))))
    assert any("nothing makes it come before" in fault for fault in world.faults())


def test_what_cannot_be_captured_is_found() -> None:
    forked = [Op("record", "compute", (0,)), Op("wait", "comm", (0,)), Op("read", "comm", (0, 0, 1))]
    check_capture([*forked, Op("record", "comm", (1,)), Op("wait", "compute", (1,))])
    for ops, why in (
        (forked, "nobody waits for the end of comm"),
        ([*forked, Op("wait", "compute", (9,))], "compute waits for what is not captured"),
        (forked[2:], "comm begins without waiting"),
    ):
        with pytest.raises(AssertionError, match=why):
            check_capture(ops)
