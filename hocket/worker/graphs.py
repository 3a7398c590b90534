"""CUDA graphs of decode steps: of each captured number of rows one of the whole step, and where steps are split one of
all its ubatches. Knows nothing of requests' parameters or of scheduling.

A graph holds the whole model, the logits and the greedy choice; one of ubatches holds the streams that they compute on
and send on. What changes from step to step lies in buffers that stay where they are (`graph_inputs.py`). Replaying
needs no threads: ubatches take turns only while they are captured, by the executor that runs them in eager steps.

Legend: S captured rows, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket import envs
from hocket.attention.plan import Plan
from hocket.config.graphs import GraphConfig
from hocket.errors import HocketError
from hocket.models.base import CausalLM, UBatchInputs
from hocket.moe.layer import MoELayer
from hocket.moe.side import INLINE, Side, SideStream
from hocket.overlap.executor import UBatchExecutor
from hocket.overlap.slices import equal_bounds
from hocket.overlap.views import join
from hocket.worker.capture import Captured, GraphPool, TimeLimit, said_of
from hocket.worker.graph_inputs import GraphInputs
from hocket.worker.inputs import HostInputs
from hocket.worker.sampler import greedy

logger = logging.getLogger(__name__)
Forward = Callable[[tuple[UBatchInputs, ...], tuple[Plan, ...]], Sequence[Tensor]]
"""The model on all ubatches, with the plans of their attention: hidden states of each."""


class DecodeGraph:
    """The decode of S rows. After `replay`: `logits` fp32 [S, V] and `ids` int64 [S], the greedy choice (-1: not
    finite), overwritten by the next one."""

    def __init__(self, model: CausalLM, inputs: GraphInputs, forward: Forward) -> None:
        self.inputs = inputs
        self.logits: Tensor
        self.ids: Tensor
        self._model, self._forward = model, forward
        self._graph: Captured
        self._fullest = HostInputs.nothing()  # of the steps since replays were timed

    def capture(self, pool: GraphPool) -> None:
        """Run the step a few times, then once more while it is recorded. All ranks of an expert group together."""
        self.inputs.fill(HostInputs.nothing())
        self._graph = pool.capture(self._run)

    def replay(self, host: HostInputs) -> None:
        """Put the step of `host`, at most S requests of one token each, on the current stream."""
        if host.num_tokens >= self._fullest.num_tokens:
            self._fullest = host
        self.inputs.fill(host)
        self._graph.replay()

    def replay_us(self, count: int) -> float:
        """µs of one of `count` replays back to back, of the step since the last such call that had most requests: at
        the end of a run few are left, which use the same graph. It writes to those requests' places in the caches,
        whoever has them by now."""
        fullest, self._fullest = self._fullest, HostInputs.nothing()
        self.inputs.fill(fullest)
        return self._graph.replay_us(count)

    def _run(self) -> None:
        hidden = join(self._forward(self.inputs.ubatches(), self.inputs.plans))
        self.logits = self._model.compute_logits(hidden)
        ids, finite = greedy(self.logits)
        self.ids = torch.where(finite, ids, -1)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What graphs are made of: a rank's model, its caches (their last block is the padding's), and what runs ubatches.

    last_ids: see `GraphInputs`.
    """

    rank: int
    model: CausalLM
    kv_caches: list[Tensor]
    max_model_len: int
    last_ids: Tensor
    executor: UBatchExecutor
    num_ubatches: int

    def graph(self, size: int, num_ubatches: int) -> DecodeGraph:
        """Of `size` rows, cut at equal numbers of them; not captured yet."""
        bounds = equal_bounds(size, num_ubatches)
        inputs = GraphInputs(self.model, self.kv_caches[0], self.max_model_len, bounds, self.last_ids)
        return DecodeGraph(self.model, inputs, self._whole if num_ubatches == 1 else self._split)

    def _whole(self, ubatches: tuple[UBatchInputs, ...], plans: tuple[Plan, ...]) -> list[Tensor]:
        [inputs], [plan] = ubatches, plans
        return [self.model(inputs, self.kv_caches, plan)]

    def _split(self, ubatches: tuple[UBatchInputs, ...], plans: tuple[Plan, ...]) -> list[Tensor]:
        return self.executor.run_captured(ubatches, self.kv_caches, plans)


@contextmanager
def shared_experts_on(side: Side, model: CausalLM) -> Iterator[None]:
    """While this is entered, the shared experts of all layers are computed there."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.side = side
    try:
        yield
    finally:
        for layer in layers:
            layer.side = INLINE


def side_of_whole(device: torch.device) -> Side:
    """Where a step that is not split computes its shared experts: ubatches need no second stream beside transfers, as
    there is always another ubatch."""
    return SideStream(device) if envs.SHARED_EXPERTS_STREAM.get_int(0) else INLINE


class DecodeGraphs:
    """The captured graphs by size and number of ubatches. `seconds`, `num_bytes`: what capturing took."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self.seconds = 0.0
        self.num_bytes = 0

    def capture(
        self, parts: Parts, config: GraphConfig, time_limit: TimeLimit, on_progress: Callable[[int, int], None]
    ) -> None:
        """Capture all of `config`, the largest first, since the smaller ones fit into its memory."""
        started = time.monotonic()
        parts.model.rotary.reserve(parts.max_model_len)
        pool = GraphPool()
        side = side_of_whole(parts.last_ids.device)
        kinds = [(size, 1) for size in config.sizes] + [(size, parts.num_ubatches) for size in config.split_sizes]
        for done, (size, num_ubatches) in enumerate(sorted(kinds, key=lambda kind: (-kind[0], kind[1]))):
            on_progress(done, len(kinds))
            what = f"capturing the {name_of(size, num_ubatches)}"
            advice = "run with --enforce-eager" if num_ubatches == 1 else "run with --no-split-graphs"
            beside = side if num_ubatches == 1 else INLINE
            with (
                time_limit(what),
                said_of(f"rank {parts.rank}: {what}", advice),
                parts.executor.patient(config.capture_timeout_s),
            ):
                graph = parts.graph(size, num_ubatches)
                with shared_experts_on(beside, parts.model):
                    graph.capture(pool)
            self._graphs[size, num_ubatches] = graph
        self.num_bytes = pool.taken_bytes()
        self.seconds = time.monotonic() - started
        on_progress(len(kinds), len(kinds))
        said = "captured %d CUDA graphs, %d of them split, of up to %d rows in %.1f s, %.2f GB"
        logger.info(said, len(kinds), len(config.split_sizes), max(config.sizes), self.seconds, self.num_bytes / 1e9)

    def __getitem__(self, key: tuple[int, int]) -> DecodeGraph:
        """(rows, ubatches)."""
        if key not in self._graphs:
            known = ", ".join(f"{size} rows in {n}" for size, n in sorted(self._graphs))
            raise HocketError(f"there is no {name_of(*key)}, only of {known or 'nothing'}")
        return self._graphs[key]


def name_of(size: int, num_ubatches: int) -> str:
    """As errors call a graph."""
    return f"CUDA graph of {size} rows" + (f" in {num_ubatches} ubatches" if num_ubatches > 1 else "")
