"""It overlaps: over an emulated link, with compute that sleeps, so that the figures do not depend on the machine.

8 sparse layers on 2 ranks; for the whole batch each stage (attention, dispatch, experts, combine) takes 20 ms, so
communication takes as long as compute. Split in two, at least 80 % of it must lie under compute in the trace; an order
that hands over before it launches (right only where launching blocks the host) must be seen to hide far less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from configs import PLAIN_MOE
from ranks import RankEnv, RankPool
from torch import Tensor, nn

from hocket.attention.base import AttentionMetadata
from hocket.models.base import UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.moe.experts.base import Experts
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.router import Router
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.moe.transport.torch_a2a import TorchTransport
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.overlap.schedule import HAND_OVER_FIRST, LAUNCH_FIRST, Schedule
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import split_inputs
from hocket.trace.figures import step_figures
from hocket.trace.spans import Recorder

pytestmark = pytest.mark.alone
CPU = torch.device("cpu")
NUM_LAYERS, NUM_TOKENS, HIDDEN, STAGE_S = 8, 64, 256, 0.020
REPEATS = 5


class SleepingExperts(Experts):
    """Takes STAGE_S for as many rows as the whole batch brings."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        time.sleep(STAGE_S * x.shape[0] / NUM_TOKENS)
        return x.clone()


class SleepingModel(nn.Module):
    """Attention that sleeps, and real sparse layers around experts that sleep."""

    def __init__(self, env: RankEnv) -> None:
        super().__init__()
        placement = ExpertPlacement(2, 2, "linear")
        config = replace(PLAIN_MOE, num_experts=2, top_k=1, layers=(True,) * NUM_LAYERS)
        row_bytes = HIDDEN * 4
        link = LinkEmulator(
            TorchTransport(placement, env.rank, env.groups[2], CPU),
            latency_us=0.0,
            gb_per_s=NUM_TOKENS / 2 * row_bytes / STAGE_S / 1e9,
        )
        self.layers = nn.ModuleList()
        for _ in range(NUM_LAYERS):
            router = Router(config, HIDDEN, device=CPU, dtype=torch.float32)
            with torch.no_grad():
                router.weight.copy_(torch.tensor([[1.0], [-1.0]]) * torch.ones(2, HIDDEN))
            experts = SleepingExperts(1, HIDDEN, 16, hidden_act="silu", device=CPU, dtype=torch.float32)
            self.layers.append(MoELayer(router, experts, link))

    def forward(self, inputs: UBatchInputs, kv_cache: list[Tensor]) -> Tensor:
        # Every second token to each rank, so that loads are equal whatever the cut.
        x = torch.where(inputs.token_ids[:, None] % 2 == 0, 1.0, -1.0).expand(-1, HIDDEN).contiguous()
        for layer in self.layers:
            time.sleep(STAGE_S * inputs.layout.num_tokens / NUM_TOKENS)
            x = layer(x, inputs.layout)
        return x


def whole_batch() -> UBatchInputs:
    ids = torch.arange(NUM_TOKENS)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        block_table_cpu=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=ids,
        query_start_loc_cpu=(0, NUM_TOKENS),
        seq_lens_cpu=(NUM_TOKENS,),
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
        num_tokens=NUM_TOKENS,
    )
    layout = TokenLayout.of(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, CPU)
    return UBatchInputs(token_ids=ids, positions=ids, attention=meta, layout=layout)


def measure(env: RankEnv, kind: str, schedule: Schedule) -> list[tuple[float, float, float, float]]:
    """(unsplit s, split s, communication s and the part of it under compute in the split step), REPEATS times."""
    found = []
    with torch.inference_mode():
        model = SleepingModel(env)
        executor = UBatchExecutor(model, kind, 2, 20.0, CPU)  # type: ignore[arg-type]
        executor.schedules["prefill"] = schedule
        whole = whole_batch()
        halves = split_inputs(whole, cut_batch([NUM_TOKENS], equal_bounds(NUM_TOKENS, 2)))
        for _ in range(REPEATS):
            started = time.perf_counter()
            executor.run((whole,), [], "prefill")
            unsplit = time.perf_counter() - started
            executor.recorder = Recorder()
            started = time.perf_counter()
            executor.run(halves, [], "prefill")
            split = time.perf_counter() - started
            figures = step_figures(executor.recorder.steps)
            executor.recorder = None
            assert figures.step_ns / 1e9 <= split
            found.append((unsplit, split, figures.comm_ns / 1e9, figures.hidden_ns / 1e9))
        executor.close()
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(2)
    yield made
    made.close()


def figures_of(pool: RankPool, kind: str, schedule: Schedule) -> Iterator[tuple[float, float]]:
    """Per rank: split / unsplit, and the share of the communication that is hidden; medians."""
    for rank, runs in enumerate(pool.run(measure, kind, schedule, timeout_s=60.0)):
        ratio = statistics.median(split / unsplit for unsplit, split, _, _ in runs)
        hidden = statistics.median(under / comm for _, _, comm, under in runs)
        print(f"rank {rank}, {kind}, {schedule.name}: split / unsplit {ratio:.3f}, {hidden:.1%} hidden: {runs}")
        yield ratio, hidden


@pytest.mark.parametrize("kind", EXECUTORS)
def test_communication_hides_behind_compute(pool: RankPool, kind: str) -> None:
    for ratio, hidden in figures_of(pool, kind, LAUNCH_FIRST):
        assert ratio <= 0.65
        assert hidden >= 0.80


def test_a_wrong_order_is_seen(pool: RankPool) -> None:
    for ratio, hidden in figures_of(pool, "greenlet", HAND_OVER_FIRST):
        assert ratio > 0.65
        assert hidden < 0.60
