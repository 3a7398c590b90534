"""Stands in for the module deep_ep on CPU ranks: the same calls, checks and layouts, over torch.distributed.

What the library leaves undefined holds NaN here, what it would hang at raises, and results of a low-latency dispatch or
combine are there only when their hook has run. It takes any dtype and width. For tests only.

Legend: T rows, D hidden, K top-k, E experts of all ranks, N rows received, R places of one local expert.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.quant import fp8

topk_idx_t = torch.int64
FULL = "NVSHMEM_QP_DEPTH"


def install() -> None:
    """Make `import deep_ep` find this module, and let transports take what tiny models are made of."""
    from hocket.moe.transport import deepep_library

    sys.modules["deep_ep"] = sys.modules[__name__]
    deepep_library.check_high_throughput = deepep_library.check_low_latency = _takes_all


def _takes_all(sizes: object, numbering: object) -> None:
    """No kernels, no limits."""


@dataclass(frozen=True)
class Config:
    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms // 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes


class Buffer:
    num_sms: int = 20
    alive = 0

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert explicitly_destroy, "without it the library may hang when it is collected"
        assert Buffer.alive == 0, "a buffer of before was not destroyed"
        assert num_rdma_bytes == 0 or low_latency_mode
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.nvshmem_qp_depth = int(os.environ.get(FULL, "1024"))
        if low_latency_mode:
            assert os.environ["NVSHMEM_REMOTE_TRANSPORT"] == "none"
        self._in_flight = ""
        Buffer.alive += 1

    def destroy(self) -> None:
        dist.barrier(self.group)
        Buffer.alive -= 1

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, 24, 256)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, 10, 256)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 4 * num_experts * num_max_dispatch_tokens_per_rank * (2 * hidden + 16)

    # -- high throughput -------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        per_rank = num_experts // self.group_size
        owner = torch.where(topk_idx < 0, -1, topk_idx // per_rank)
        is_in_rank = (owner[:, None] == torch.arange(self.group_size)[:, None]).any(-1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in_rank.sum(0).int(), None, per_expert.int(), is_in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, list[int], tuple[Any, ...], Any]:
        assert handle is None
        assert config is not None
        assert num_worst_tokens > 0
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert self.num_nvl_bytes >= config.get_nvl_buffer_size_hint(x.shape[1] * x.itemsize, self.group_size)
        assert x.is_contiguous()
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert len(x) == len(topk_idx) == len(topk_weights) > 0
        num_experts = len(num_tokens_per_expert)
        per_rank, first = num_experts // self.group_size, num_experts // self.group_size * self.rank
        rows = [is_token_in_rank[:, rank].nonzero()[:, 0] for rank in range(self.group_size)]
        came = self._exchange([(x[i], topk_idx[i], topk_weights[i]) for i in rows])
        sizes = [len(part[0]) for part in came]
        assert sum(sizes) <= num_worst_tokens, "the library would write past the end"
        recv_x = x.new_full((num_worst_tokens, x.shape[1]), torch.nan)
        recv_ids = topk_idx.new_full((num_worst_tokens, topk_idx.shape[1]), -1)
        recv_weights = topk_weights.new_full((num_worst_tokens, topk_idx.shape[1]), torch.nan)
        recv_x[: sum(sizes)] = torch.cat([part[0] for part in came])
        ids = torch.cat([part[1] for part in came]) - first
        is_here = (ids >= 0) & (ids < per_rank)
        recv_ids[: sum(sizes)] = torch.where(is_here, ids, -1)
        recv_weights[: sum(sizes)] = torch.where(is_here, torch.cat([part[2] for part in came]), 0.0)
        kept = sizes, rows, len(x), num_worst_tokens, config.num_sms
        return recv_x, recv_ids, recv_weights, [], kept, None

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any]:
        sizes, rows, num_rows, num_worst_tokens, num_sms = handle
        assert x.is_contiguous()
        assert len(x) == num_worst_tokens
        assert config is not None
        assert config.num_sms == num_sms, "not as many channels as the dispatch had"
        back = self._exchange([part.clone() for part in x[: sum(sizes)].split(sizes)])
        total = torch.zeros(num_rows, x.shape[1])
        for index, part in zip(rows, back, strict=True):
            total.index_add_(0, index, part.float())
        return total.to(x.dtype), None, None

    # -- low latency -----------------------------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple[Any, ...], Any, Callable[[], None]]:
        most, per_rank = num_max_dispatch_tokens_per_rank, num_experts // self.group_size
        self._check_low_latency(x, topk_idx, most)
        assert not use_ue8m0
        assert not round_scale
        assert return_recv_hook
        assert len(x) == len(topk_idx)
        hint = self.get_low_latency_rdma_size_hint(most, x.shape[1], self.group_size, num_experts)
        assert hint <= self.num_rdma_bytes
        rows = x.new_full((per_rank, self.group_size * most, x.shape[1]), torch.nan)
        values = rows.to(torch.float8_e4m3fn)
        scales = torch.full((per_rank, x.shape[1] // 128, self.group_size * most), torch.nan).transpose(1, 2)
        assert not use_fp8 or x.shape[1] % 512 == 0
        counts = torch.full((per_rank,), -(2**30), dtype=torch.int32)
        sources: list[list[Tensor]] = []
        to_ranks = []
        for rank in range(self.group_size):
            here = [(topk_idx == rank * per_rank + e).any(-1).nonzero()[:, 0] for e in range(per_rank)]
            to_ranks.append((most, [(x[i], i) for i in here]))
        self._begin("dispatch")
        came = self._exchange(to_ranks)
        assert all(theirs == most for theirs, _ in came), "ranks differ in how many tokens a dispatch may have"

        def hook() -> None:
            self._end()
            for e in range(per_rank):
                parts = [part[e] for _, part in came]
                here = torch.cat([part for part, _ in parts])
                rows[e, : len(here)] = here
                if use_fp8:
                    values[e, : len(here)], scales[e, : len(here)] = fp8.quantize_rows(here)
                counts[e] = len(here)
                sources.append([index for _, index in parts])

        came_as: Any = (values, scales) if use_fp8 else rows
        return came_as, counts, (sources, most, x.shape[1], num_experts), None, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Any, Callable[[], None]]:
        sources, most, hidden, num_experts = handle
        per_rank = num_experts // self.group_size
        self._check_low_latency(x, topk_idx, most)
        assert return_recv_hook
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert x.shape == (per_rank, self.group_size * most, hidden)
        assert out is not None
        assert out.is_contiguous()
        assert out.shape == (len(topk_idx), hidden)
        back: list[list[Tensor]] = [[] for _ in range(self.group_size)]
        for e in range(per_rank):
            sizes = [len(index) for index in sources[e]]
            for rank, part in enumerate(x[e, : sum(sizes)].split(sizes)):
                back[rank].append(part.clone())  # a view would take all of x along
        self._begin("combine")
        came = self._exchange(back)

        def hook() -> None:
            self._end()
            total = torch.zeros(out.shape)
            for number in range(num_experts):
                rows, slots = (topk_idx == number).nonzero(as_tuple=True)
                part = came[number // per_rank][number % per_rank]
                total.index_add_(0, rows, part.float() * topk_weights[rows, slots, None])
            out.copy_(total)

        return out, None, hook

    def _check_low_latency(self, x: Tensor, topk_idx: Tensor, most: int) -> None:
        assert self.low_latency_mode
        assert self.nvshmem_qp_depth >= (most + 1) * 2
        assert self.group_size * most % 4 == 0
        assert x.is_contiguous()
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == topk_idx_t
        assert 0 < len(topk_idx) <= most

    def _begin(self, what: str) -> None:
        assert not self._in_flight, f"a {what} clears the counts that the {self._in_flight} before it waits for"
        self._in_flight = what

    def _end(self) -> None:
        assert self._in_flight
        self._in_flight = ""

    def _exchange(self, to_ranks: list[Any]) -> list[Any]:
        """What each rank has for this one."""
        found: list[Any] = [None] * self.group_size
        dist.all_gather_object(found, to_ranks, group=self.group)
        return [theirs[self.rank] for theirs in found]
