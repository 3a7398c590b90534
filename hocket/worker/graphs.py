"""CUDA graphs of decode steps: one per captured number of rows. Knows nothing of requests' parameters or of scheduling.

A graph holds the whole model, the logits and the greedy choice. What changes from step to step lies in buffers that
stay where they are: token ids, positions, which rows are padding, and what the attention backend plans on the host.
Padding rows are requests of one token in a block of their own that nobody else reads; no expert computes them.

Legend: S captured rows, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket import envs
from hocket.attention.base import AttentionMetadata
from hocket.cache.storage import block_size_of, num_blocks_of, slot_bytes_of
from hocket.errors import CapacityError, HocketError
from hocket.models.base import CausalLM, UBatchInputs
from hocket.moe.base import TokenLayout
from hocket.moe.layer import MoELayer
from hocket.moe.side import INLINE, Side, SideStream
from hocket.worker.inputs import KNOWN, HostInputs, fill_in
from hocket.worker.sampler import greedy

logger = logging.getLogger(__name__)
WARM_UPS = 2
IDS, POSITIONS, SOURCES, PADDING = range(4)
TimeLimit = Callable[[str], AbstractContextManager[Any]]
"""Bounds the time of what is done inside; takes what to say when it is over."""


def unlimited(what: str) -> AbstractContextManager[Any]:
    """No bound."""
    return nullcontext(what)


class Captured:
    """A graph of some work. The tensors that the work refers to live as long as it: a replay reads where they lay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        self._graph, self._work = graph, work

    def replay(self) -> None:
        """Put the work on the current stream."""
        self._graph.replay()


def captured(work: Callable[[], object], pool: Any = None) -> Captured:
    """`work` in a graph; it runs a few times before: then all it needs is compiled and loaded. pool: the memory that
    the graph shares with others."""
    stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]  # before work on a side stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    return Captured(graph, work)


class DecodeGraph:
    """The decode of S rows. After `replay`: `logits` fp32 [S, V] and `ids` int64 [S], the greedy choice (-1: not
    finite), overwritten by the next one.

    last_ids: int64, what sources point into (`HostInputs.sources`).
    """

    def __init__(self, model: CausalLM, kv_caches: list[Tensor], max_model_len: int, size: int, last_ids: Tensor):
        self.size = size
        self.logits: Tensor
        self.ids: Tensor
        self._model, self._kv_caches, self._last_ids = model, kv_caches, last_ids
        cache = kv_caches[0]
        self._scrap_block = num_blocks_of(cache) - 1
        self._block_size = block_size_of(cache)
        self._max_model_len = max_model_len
        self._host = torch.zeros(4, size, dtype=torch.int64, pin_memory=True)
        self._slots = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self._inputs = torch.zeros(4, size, dtype=torch.int64, device=last_ids.device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._attention = model.backends.attention
        self._plan = self._attention.decode_plan(
            size, max_model_len, self._block_size, model.dtype, slot_bytes_of(cache)
        )
        self._starts = torch.arange(size + 1, dtype=torch.int32)
        self._starts_cpu = tuple(range(size + 1))
        self._graph: Captured

    def capture(self, pool: Any) -> None:
        """Run the step a few times, then once more while it is recorded. All ranks of an expert group together."""
        self._fill(HostInputs.nothing())
        self._graph = captured(self._run, pool)

    def replay(self, host: HostInputs) -> None:
        """Put the step of `host`, at most S requests of one token each, on the current stream."""
        self._fill(host)
        self._graph.replay()

    def replay_us(self, count: int) -> float:
        """µs of one of `count` replays back to back, over what the last step left in the buffers."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        begin.record()
        for _ in range(count):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count

    def _run(self) -> None:
        token_ids, positions, sources, padding = self._inputs
        layout = TokenLayout(
            num_tokens=0, num_padded=self.size, is_padding=padding.to(torch.bool), num_padded_max=self.size
        )
        inputs = UBatchInputs(
            token_ids=fill_in(token_ids, sources, self._last_ids),
            positions=positions,
            attention=self._metadata(HostInputs.nothing()),
            layout=layout,
        )
        hidden = self._model(inputs, self._kv_caches, self._plan)
        self.logits = self._model.compute_logits(hidden)
        ids, finite = greedy(self.logits)
        self.ids = torch.where(finite, ids, -1)

    def _fill(self, host: HostInputs) -> None:
        """Everything that the recorded step reads, for this one. The host's buffers are free again once copied."""
        self._copied.synchronize()
        count = host.num_tokens
        rows = self._host.numpy()
        rows[:, count:] = [[0], [0], [KNOWN], [1]]
        rows[IDS, :count], rows[POSITIONS, :count], rows[PADDING, :count] = host.token_ids, host.positions, 0
        rows[SOURCES, :count] = KNOWN if host.sources is None else host.sources
        self._inputs.copy_(self._host, non_blocking=True)
        slots = self._slots.numpy()
        slots[:count], slots[count:] = host.slots, self._scrap_block * self._block_size
        self._attention.update(self._plan, self._metadata(host))
        self._copied.record()

    def _metadata(self, host: HostInputs) -> AttentionMetadata:
        """Of S requests of one token, on the host; those past the real ones lie in the scrap block."""
        size, count = self.size, host.num_tokens
        table = np.full((size, max(host.block_table.shape[1], 1)), self._scrap_block, dtype=np.int32)
        table[:count, : host.block_table.shape[1]] = host.block_table
        seq_lens = np.ones(size, dtype=np.int32)
        seq_lens[:count] = host.seq_lens
        blocks = torch.from_numpy(table)
        return AttentionMetadata(
            query_start_loc=self._starts,
            seq_lens=torch.from_numpy(seq_lens),
            block_table=blocks,
            block_table_cpu=blocks,
            slot_mapping=self._slots,
            query_start_loc_cpu=self._starts_cpu,
            seq_lens_cpu=tuple(seq_lens.tolist()),
            max_query_len=1,
            max_seq_len=self._max_model_len,
            num_tokens=size,
        )


@contextmanager
def _no_more_memory_than_there_is(what: str) -> Iterator[None]:
    """CapacityError, with what to change, where the GPU's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError:
        advice = "lower --gpu-memory-utilization or --max-cudagraph-capture-size, or run with --enforce-eager"
        raise CapacityError(f"{what} takes more memory than the KV cache leaves: {advice}") from None


@contextmanager
def _shared_experts_on(side: Side, model: CausalLM) -> Iterator[None]:
    """While this is entered, the shared experts of all layers are computed there."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.side = side
    try:
        yield
    finally:
        for layer in layers:
            layer.side = INLINE


class DecodeGraphs:
    """The captured graphs by size. `seconds`, `num_bytes`: what capturing took."""

    def __init__(self) -> None:
        self._graphs: dict[int, DecodeGraph] = {}
        self.seconds = 0.0
        self.num_bytes = 0

    def capture(
        self,
        model: CausalLM,
        kv_caches: list[Tensor],
        max_model_len: int,
        sizes: tuple[int, ...],
        last_ids: Tensor,
        time_limit: TimeLimit,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Capture all of `sizes`, the largest first, since the smaller ones fit into its memory."""
        started, before = time.monotonic(), torch.cuda.memory_reserved()
        model.rotary.reserve(max_model_len)
        pool = torch.cuda.graph_pool_handle()
        side = SideStream(last_ids.device) if envs.SHARED_EXPERTS_STREAM.get_int(0) else INLINE
        for done, size in enumerate(sorted(sizes, reverse=True)):
            on_progress(done, len(sizes))
            what = f"capturing the CUDA graph of {size} rows"
            with time_limit(what), _no_more_memory_than_there_is(what):
                graph = DecodeGraph(model, kv_caches, max_model_len, size, last_ids)
                with _shared_experts_on(side, model):
                    graph.capture(pool)
            self._graphs[size] = graph
        torch.cuda.synchronize()
        self.seconds = time.monotonic() - started
        self.num_bytes = torch.cuda.memory_reserved() - before
        on_progress(len(sizes), len(sizes))
        said = "captured %d CUDA graphs of up to %d rows in %.1f s, %.2f GB"
        logger.info(said, len(sizes), max(sizes), self.seconds, self.num_bytes / 1e9)

    def __getitem__(self, size: int) -> DecodeGraph:
        if size not in self._graphs:
            raise HocketError(f"there is no CUDA graph of {size} rows, only of {sorted(self._graphs)}")
        return self._graphs[size]
