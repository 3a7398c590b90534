"""Times a step's compute and its communication each alone, whole and in ubatches. Knows no requests of users.

All ranks of an expert group must do it together, while none of them has requests: it overwrites their caches, and
nobody may find anything there afterwards (`Scheduler.forget_prefixes`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from hocket.attention.plan import Plan
from hocket.channel.messages import TimeLanes
from hocket.config.graphs import fitting_size
from hocket.dist.collectives import gather_texts
from hocket.errors import CapacityError
from hocket.host import sent
from hocket.models.base import UBatchInputs
from hocket.moe.layer import MoELayer
from hocket.moe.side import INLINE
from hocket.overlap.cost import TokenCost, wished_cuts
from hocket.overlap.slices import Cut, cut_batch, equal_bounds
from hocket.overlap.sm_budget import UNLIMITED
from hocket.overlap.views import join, split_inputs
from hocket.scheduler.batch import Batch
from hocket.worker.capture import GraphPool, TimeLimit, Work, device_us
from hocket.worker.graph_inputs import GraphInputs
from hocket.worker.graphs import shared_experts_on, side_of_whole
from hocket.worker.inputs import HostInputs, build_inputs
from hocket.worker.kept_transfers import KeptTransfers, transfers_kept
from hocket.worker.made_batch import blocks_taken, decode_lens, made_batch, prompt_lens
from hocket.worker.sampler import greedy

if TYPE_CHECKING:
    from hocket.worker.runner import Runner

T = TypeVar("T")
COMPUTE, COMM, OUTPUT = "compute", "comm", "output"
WHOLE, HALVES = "", "_halves"


@dataclass(frozen=True)
class _Step:
    """ubatches: what the model reads. plans: of their attention, where they are rows of a graph; else none."""

    ubatches: tuple[UBatchInputs, ...]
    plans: tuple[Plan, ...] = ()


class LaneTimes:
    """The times of one step, made as `asked` says, of the same number of tokens on every rank.

    Compute alone is the step, up to the greedy choice, over transfers that move nothing: the rows that come are those
    of a step that was run before, with transfers. Communication alone is that step's transfers of one sparse layer, as
    often as there are such layers. The output alone is what comes behind the last layer. In ubatches ("halves"): as
    many as the engine may split a step into, cut likewise.

    Decodes are captured where the engine has CUDA graphs, the compute of one ubatch after that of the other, with as
    many rows as the graph that the engine would replay; everything else is launched as in a step. num_bytes: what this
    rank sends in a step, by "comm", "comm_halves".
    """

    def __init__(self, runner: Runner, asked: TimeLanes, time_limit: TimeLimit) -> None:
        self._runner, self._asked, self._limit = runner, asked, time_limit
        self._model, self._caches, self._device = runner.model, runner.kv_caches, runner.mesh.device
        self._layers = [module for module in runner.model.modules() if isinstance(module, MoELayer)]
        size = fitting_size(runner.graph_config.sizes, asked.num_tokens) if asked.phase == "decode" else 0
        self.captured = size > 0
        self.num_bytes: dict[str, int] = {}
        batch = self._batch()
        self._last_rows = _last_rows(batch, self._device)
        if self.captured:
            self._pool = GraphPool()
            host = HostInputs.of(batch, runner.config.cache.block_size)
            counts = {WHOLE: 1, HALVES: runner.config.overlap.num_ubatches}
            self._steps = {step: self._of_graph(host, size, count) for step, count in counts.items()}
        else:
            whole = build_inputs(batch, batch.num_tokens, runner.config.cache.block_size, self._device)
            self._steps = {WHOLE: _Step((whole,)), HALVES: _Step(split_inputs(whole, self._cut(batch)))}

    def _of_graph(self, host: HostInputs, size: int, num_ubatches: int) -> _Step:
        """The decode of `host` as rows of the graph of `size`, cut where that is."""
        ids = torch.zeros(1, dtype=torch.int64, device=self._device)  # no row takes its own from there
        longest = self._runner.config.scheduler.max_model_len
        inputs = GraphInputs(self._model, self._caches[0], longest, equal_bounds(size, num_ubatches), ids)
        inputs.fill(host)
        return _Step(inputs.ubatches(), inputs.plans)

    def measure(self) -> dict[str, list[float]]:
        """µs of a step by name ("compute", "compute_halves", "comm", "comm_halves", "output"), one of each repeat, in
        turn."""
        patience_s = self._runner.config.graphs.capture_timeout_s  # what runs first may have to be compiled
        with (
            transfers_kept(self._layers) as kept,
            self._all_of_the_device(),
            self._runner.executor.patient(patience_s),
        ):
            for name, made in self._steps.items():
                kept.select(name, moves=True)
                self._run(made)
                self.num_bytes[f"{COMM}{name}"] = kept.num_bytes * len(self._layers)
            kinds = [*product((COMPUTE, COMM), self._steps), (OUTPUT, WHOLE)]
            works = {
                (lane, step): self._limited(lane, partial(self._prepared, kept, lane, step)) for lane, step in kinds
            }
            found: dict[str, list[float]] = {f"{lane}{step}": [] for lane, step in works}
            for _ in range(self._asked.repeats):
                for (lane, step), work in works.items():
                    kept.select(step, moves=False)
                    found[f"{lane}{step}"].append(self._limited(lane, partial(self._us, work)))
        return found

    def _prepared(self, kept: KeptTransfers, lane: str, step: str) -> Work:
        """What is timed; it has run before."""
        self._meet()
        kept.select(step, moves=False)
        work: Work = partial(self._run, self._steps[step])
        if lane == COMM:
            work = partial(kept.move, len(self._layers))
        elif lane == OUTPUT:
            size = len(self._steps[step].ubatches[0].token_ids), self._model.config.hidden_size
            work = partial(self._sample, [torch.randn(size, dtype=self._model.dtype, device=self._device)])
        elif self.captured:
            work = partial(self._compute_of_graph, kept, self._steps[step])
        if not self.captured:
            work()
            return work
        with shared_experts_on(side_of_whole(self._device) if step == WHOLE else INLINE, self._model):
            return self._pool.capture(work).replay

    def _run(self, step: _Step) -> None:
        """As the engine runs it without a graph, or while it is captured."""
        executor = self._runner.executor
        if step.plans:
            self._sample(executor.run_captured(step.ubatches, self._caches, step.plans))
        else:
            self._sample(executor.run(step.ubatches, self._caches, self._asked.phase))

    def _compute_of_graph(self, kept: KeptTransfers, step: _Step) -> None:
        """A step's compute that touches nothing on the host, so that it can be captured."""
        hidden = []
        for kept.ubatch, (part, plan) in enumerate(zip(step.ubatches, step.plans, strict=True)):
            hidden.append(self._model(part, self._caches, plan))
        self._sample(hidden)

    def _sample(self, hidden: list[Tensor]) -> None:
        rows = join(hidden)
        if self._last_rows is not None:
            rows = rows[self._last_rows]
        greedy(self._model.compute_logits(rows))

    @contextmanager
    def _all_of_the_device(self) -> Iterator[None]:
        """A lane alone leaves no multiprocessors to the other one."""
        executor = self._runner.executor
        budget, executor.budget = executor.budget, UNLIMITED
        try:
            yield
        finally:
            executor.budget = budget

    def _us(self, work: Work) -> float:
        """µs of one of `count` times in a row, all ranks from the same moment on."""
        count = self._asked.count
        self._meet()
        if self._device.type != "cuda":
            started = time.perf_counter()
            for _ in range(count):
                work()
            return (time.perf_counter() - started) * 1e6 / count
        return device_us(work, count)

    def _meet(self) -> None:
        """All ranks are done with what they launched: transfers alone may write to where another rank's compute alone
        reads, and nothing else orders the two."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._runner.mesh.ep_size > 1:
            gather_texts("")

    def _limited(self, lane: str, work: Callable[[], T]) -> T:
        with self._limit(f"timing the {lane} of a {self._asked.phase} of {self._asked.num_tokens} tokens"):
            return work()

    def _batch(self) -> Batch:
        """With other random ids on every rank."""
        asked, config = self._asked, self._runner.config
        lens = decode_lens if asked.phase == "decode" else prompt_lens
        draw, ids = random.Random(self._runner.mesh.rank), range(config.model.vocab_size)
        batch = made_batch(
            lens(asked.num_tokens, asked.length), iter(lambda: draw.choice(ids), None), config.cache.block_size
        )
        if (needed := blocks_taken(batch)) > self._runner.num_blocks:
            raise CapacityError(
                f"a step to be timed takes {needed} cache blocks, and there are {self._runner.num_blocks}"
            )
        return batch

    def _cut(self, batch: Batch) -> Cut:
        """As all ranks would be with batches like this one."""
        overlap, num_tokens = self._runner.config.overlap, batch.num_tokens
        bounds = equal_bounds(num_tokens, overlap.num_ubatches)
        if overlap.cut == "cost":
            wish = wished_cuts(batch, TokenCost.of(self._runner.config.model), overlap.num_ubatches)
            bounds = (*wish.cuts, num_tokens)
        return cut_batch([row.num_tokens for row in batch.requests], bounds)


def _last_rows(batch: Batch, device: torch.device) -> Tensor | None:
    """int64, the rows that are sampled from; None: all are."""
    ends = accumulate(row.num_tokens for row in batch.requests)
    rows = [end - 1 for end, row in zip(ends, batch.requests, strict=True) if row.needs_sample]
    return None if len(rows) == batch.num_tokens else sent(rows, torch.int64, device)
