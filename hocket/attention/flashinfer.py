"""Attention with FlashInfer's paged kernels, planned on the host once a step. Knows no projections and no rotary.

Grouped-query attention reads keys and values from the cache. Latents are attended absorbed where rows are few for
their context (`mla.py` says what that is), and expanded into keys and values of heads for prompts. Decode of a fixed
number of rows can be captured in a CUDA graph: its plan lives in buffers that `update` fills.

Legend: T rows, R requests, H query heads, G key/value heads, C head width, N unrotated and P rotated width of a head,
V value width, L latent width, S tokens of contexts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hocket.attention.backend import AttentionBackend
from hocket.attention.base import AttentionMetadata
from hocket.attention.decode_buffers import DecodeBuffers
from hocket.attention.flashinfer_library import HeadShapes, Library, WrapperSet
from hocket.attention.latent_calls import at, attend_absorbed, attend_expanded, written_at
from hocket.attention.paging import Piece, latent_groups, pages, pieces, rows_of, slots_of, starts_of
from hocket.attention.plan import Plan, Rows
from hocket.layers.kernels import Places
from hocket.trace import spans
from hocket.trace.spans import Stage

if TYPE_CHECKING:
    from hocket.attention.triton_mla import LatentDecodes

MAX_EXPANDED_BYTES = 1 << 30
"""Most bytes of keys and values that latents are expanded into at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One call: the rows that attend, and the wrapper that holds its plan."""

    rows: Rows
    wrapper: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpandedRun(Run):
    """slots: int64 [S] of the requests' contexts in the cache; None: nothing is past, they are the rows' own."""

    slots: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashInferPlan(Plan):
    """paged: calls over the cache; expanded: calls over expanded latents. write_rows is None, slots may be −1."""

    paged: tuple[Run, ...]
    expanded: tuple[ExpandedRun, ...] = ()
    covers_all: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedPlan(FlashInferPlan):
    """Decode of exactly `num_rows` requests; kernels read `buffers`, also when a graph is replayed."""

    buffers: DecodeBuffers
    block_size: int
    dtype: torch.dtype


class FlashInferAttention(AttentionBackend[FlashInferPlan]):
    """For one model's heads on one device."""

    name = "flashinfer"
    captures: ClassVar[bool] = True

    def __init__(self, heads: HeadShapes, device: torch.device) -> None:
        self._heads = heads
        self._device = device
        self._library = Library(heads, device)
        self._own_latents = self._make_own_latents() if heads.decodes_latents_with_triton else None

    def plan(
        self, meta: AttentionMetadata, num_rows: int, block_size: int, dtype: torch.dtype, slot_bytes: int
    ) -> FlashInferPlan:
        wrappers = self._library.take()
        parts = pieces(meta)
        paged: tuple[Run, ...] = ()
        expanded: tuple[ExpandedRun, ...] = ()
        if self._heads.mla is not None:
            paged, expanded = self._plan_latents(wrappers, meta, parts, block_size, dtype)
        elif parts:
            paged = (self._plan_heads(wrappers, meta, parts, block_size, dtype),)
        wrappers.fence.set()
        plan = FlashInferPlan(
            num_rows=num_rows,
            write_rows=None,
            write_slots=meta.slot_mapping[: meta.num_tokens],
            paged=paged,
            expanded=expanded,
            covers_all=meta.num_tokens == num_rows,
        )
        weakref.finalize(plan, self._library.give_back, wrappers).atexit = False
        return plan

    def decode_plan(
        self, num_rows: int, max_seq_len: int, block_size: int, dtype: torch.dtype, slot_bytes: int
    ) -> CapturedPlan:
        buffers = DecodeBuffers(num_rows, -(-max_seq_len // block_size), self._device)
        on_device = buffers.device
        wrapper: Any
        if self._own_latents is not None:
            wrapper = self._own_latents.make(on_device, block_size)
        else:
            wrapper = self._library.make_captured(on_device["indptr"], on_device["indices"], on_device["lens"])
        if self._heads.mla is None:  # choose its kernel; any contexts will do
            last = torch.ones(num_rows, dtype=torch.int32)
            options = self._head_options(block_size, dtype)
            wrapper.plan(buffers.host["rows"], on_device["indices"][:num_rows], last, **options)
        return CapturedPlan(
            num_rows=num_rows,
            write_rows=None,
            write_slots=on_device["slots"],
            paged=(Run(rows=slice(0, num_rows), wrapper=wrapper),),
            covers_all=True,
            buffers=buffers,
            block_size=block_size,
            dtype=dtype,
        )

    def update(self, plan: FlashInferPlan, meta: AttentionMetadata) -> None:
        assert isinstance(plan, CapturedPlan)
        [run], buffers, host = plan.paged, plan.buffers, plan.buffers.host
        is_latent = self._heads.mla is not None
        indices = host["indices"][: buffers.fill(meta, plan.block_size, whole_contexts=is_latent)]
        if is_latent and self._own_latents is None:
            options = self._latent_options(plan.block_size, plan.dtype)
            run.wrapper.plan(host["rows"], host["indptr"], indices, host["lens"], causal=False, **options)
        else:
            buffers.send("indptr")
            buffers.send("indices", len(indices))
            buffers.send("lens")
        if not is_latent:
            options = self._head_options(plan.block_size, plan.dtype)
            self._library.replan(run.wrapper, host["indptr"], indices, host["lens"], **options)
        buffers.fence.set()

    def grouped_query(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: FlashInferPlan, scale: float
    ) -> Tensor:
        from hocket.attention.store import store_kv

        spans.begin(Stage.ATTENTION)
        assert scale == self._heads.scale
        if plan.write_slots is not None:
            store_kv(cache, key, value, plan.write_slots)
        out = _output(query, query.shape[2], plan)
        for run in plan.paged:
            run.wrapper.run(query[run.rows], (cache[0], cache[1]), out=out[run.rows])
        return out.flatten(1)

    def places(self, cache: Tensor, plan: FlashInferPlan) -> Places | None:
        if plan.write_slots is None or self._heads.mla is None:
            return None
        return Places(cache.view(-1, cache.shape[2]), plan.write_slots)

    def latent(
        self,
        query: Tensor,
        latent: Tensor,
        kv_b: Tensor,
        cache: Tensor,
        plan: FlashInferPlan,
        scale: float,
        is_stored: bool = False,
    ) -> Tensor:
        from hocket.attention.store import store_latent

        spans.begin(Stage.ATTENTION)
        assert scale == self._heads.scale
        if plan.write_slots is not None and not is_stored:
            store_latent(cache, latent, plan.write_slots)
        rotated = latent.shape[1] - kv_b.shape[2]
        out = _output(query, kv_b.shape[1] - (query.shape[2] - rotated), plan)
        for run in plan.paged:
            with written_at(out, run.rows) as part:
                attend_absorbed(at(query, run.rows), kv_b, cache, run.wrapper, part)
        for run in plan.expanded:
            context = at(latent, run.rows) if run.slots is None else cache.flatten(0, 1).index_select(0, run.slots)
            with written_at(out, run.rows) as part:
                attend_expanded(at(query, run.rows), context, kv_b, run.wrapper, part)
        return out.flatten(1)

    def _make_own_latents(self) -> LatentDecodes:
        from hocket.attention.triton_mla import LatentDecodes

        return LatentDecodes(self._heads, self._library.num_sms, self._device)

    def _plan_heads(
        self, wrappers: WrapperSet, meta: AttentionMetadata, parts: Sequence[Piece], block_size: int, dtype: torch.dtype
    ) -> Run:
        """All rows in one call; `parts` is not empty."""
        lens, tables = _contexts(meta, parts)
        found = pages(tables, lens, block_size)
        blocks = self._pinned(found.indptr), self._pinned(found.indices), self._pinned(found.last)
        options = self._head_options(block_size, dtype)
        longest = max(part.num_rows for part in parts)
        if longest == 1:
            wrapper = wrappers.get("decode")
            wrapper.plan(*blocks, **options)
        else:
            wrapper = wrappers.get("prefill")
            options["head_dim_qk"] = options.pop("head_dim")
            starts = self._pinned(starts_of([part.num_rows for part in parts]))
            wrapper.plan(starts, *blocks, causal=True, max_token_per_sequence=longest, **options)
        return Run(rows=self._rows(parts), wrapper=wrapper)

    def _plan_latents(
        self, wrappers: WrapperSet, meta: AttentionMetadata, parts: Sequence[Piece], block_size: int, dtype: torch.dtype
    ) -> tuple[tuple[Run, ...], tuple[ExpandedRun, ...]]:
        mla, num_heads = self._heads.mla, self._heads.num_heads
        assert mla is not None
        expanded_width = mla.qk_nope_head_dim + mla.v_head_dim + mla.qk_head_dim
        most = MAX_EXPANDED_BYTES // (num_heads * expanded_width * dtype.itemsize)
        few, many = latent_groups(parts, num_heads, most)
        paged = [
            self._plan_paged(wrappers.get("latent", i), meta, group, block_size, dtype) for i, group in enumerate(few)
        ]
        expanded = [
            self._plan_expanded(wrappers.get("ragged", i), meta, group, block_size, dtype)
            for i, group in enumerate(many)
        ]
        return tuple(paged), tuple(expanded)

    def _plan_paged(
        self, wrapper: Any, meta: AttentionMetadata, parts: Sequence[Piece], block_size: int, dtype: torch.dtype
    ) -> Run:
        """Absorbed: rows over the latents in the cache."""
        lens, tables = _contexts(meta, parts)
        found = pages(tables, lens, block_size)
        arrays = starts_of([part.num_rows for part in parts]), found.indptr, found.indices, lens
        causal = any(part.num_rows > 1 for part in parts)
        wrapper.plan(*map(self._pinned, arrays), causal=causal, **self._latent_options(block_size, dtype))
        return Run(rows=self._rows(parts), wrapper=wrapper)

    def _plan_expanded(
        self, wrapper: Any, meta: AttentionMetadata, parts: Sequence[Piece], block_size: int, dtype: torch.dtype
    ) -> ExpandedRun:
        """Un-absorbed: rows over keys and values of the parts' contexts, one after another."""
        lens, tables = _contexts(meta, parts)
        heads, mla = self._heads, self._heads.mla
        assert mla is not None
        wrapper.plan(
            self._pinned(starts_of([part.num_rows for part in parts])),
            self._pinned(starts_of(lens)),
            num_qo_heads=heads.num_heads,
            num_kv_heads=heads.num_heads,
            head_dim_qk=mla.qk_head_dim,
            head_dim_vo=mla.v_head_dim,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        slots = None
        if any(part.past for part in parts):
            slots = self._sent(slots_of(tables, lens, block_size))
        return ExpandedRun(rows=self._rows(parts), wrapper=wrapper, slots=slots)

    def _head_options(self, block_size: int, dtype: torch.dtype) -> dict[str, Any]:
        heads = self._heads
        return {
            "num_qo_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "page_size": block_size,
            "sm_scale": heads.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def _latent_options(self, block_size: int, dtype: torch.dtype) -> dict[str, Any]:
        mla = self._heads.mla
        assert mla is not None
        return {
            "num_heads": self._heads.num_heads,
            "head_dim_ckv": mla.kv_lora_rank,
            "head_dim_kpe": mla.qk_rope_head_dim,
            "page_size": block_size,
            "sm_scale": self._heads.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def _rows(self, parts: Sequence[Piece]) -> Rows:
        rows = rows_of(parts)
        return rows if isinstance(rows, slice) else self._sent(rows)

    def _sent(self, values: np.ndarray) -> Tensor:
        return self._pinned(values).to(self._device, non_blocking=True)

    def _pinned(self, values: np.ndarray) -> Tensor:
        """On the host, in memory that a copy to the GPU need not be waited for."""
        x = torch.from_numpy(values)
        return x.pin_memory() if self._device.type == "cuda" else x


def _contexts(meta: AttentionMetadata, parts: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Of each part: tokens of its context, int32 [R], and blocks, int32 [R, B]."""
    lens = np.fromiter((part.context for part in parts), dtype=np.int32, count=len(parts))
    return lens, meta.block_table_cpu.numpy()[[part.request for part in parts]]


def _output(query: Tensor, width: int, plan: FlashInferPlan) -> Tensor:
    """[T, H, width], zero where no call writes."""
    shape = (plan.num_rows, query.shape[1], width)
    return query.new_empty(shape) if plan.covers_all else query.new_zeros(shape)
