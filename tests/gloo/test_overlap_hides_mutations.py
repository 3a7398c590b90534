"""The check of `test_overlap_hides` is not blind: transfers launched too late leave answers right and hide less."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from unittest import mock

import pytest
from ranks import RankEnv, RankPool
from test_overlap_hides import measure

from hocket.overlap.executor import EXECUTORS
from hocket.ubatch import context, transfer
from hocket.ubatch.lanes import Pending, Work, WorkerLane


def measure_late(env: RankEnv, kind: str) -> list[tuple[float, float, float, float]]:
    """As `measure`, but ubatches hand over before they launch a transfer, not after."""
    launch = WorkerLane.launch

    def no_hand_over(receive: Work | None = None) -> None:
        if receive is not None:
            receive()

    def launch_late(lane: WorkerLane, work: Work, name: str) -> Pending:
        if name.endswith("send"):
            context.hand_over()
        return launch(lane, work, name)

    with mock.patch.object(WorkerLane, "launch", launch_late), mock.patch.object(transfer, "hand_over", no_hand_over):
        return measure(env, kind)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(2)
    yield made
    made.close()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_hand_over_before_the_launch_hides_less(pool: RankPool, kind: str) -> None:
    for rank, runs in enumerate(pool.run(measure_late, kind, timeout_s=60.0)):
        hidden = statistics.median(1 - exposed / comm for _, _, comm, exposed in runs)
        ratio = statistics.median(split / unsplit for unsplit, split, _, _ in runs)
        print(f"rank {rank}, {kind}: split / unsplit {ratio:.3f}, {hidden:.1%} of the communication hidden")
        assert hidden < 0.6, runs
