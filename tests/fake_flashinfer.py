"""Stands in for FlashInfer on a CPU: the classes Hocket uses, computed from the definition in fp64. For tests only.

As strict as the real one: plans take int32 tensors on the host, rows must be as many as planned, and what a kernel
reads it finds where the plan put it, so a captured plan reads its buffers at the time of the call.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.cache import storage


def host(*tensors: Tensor) -> list[list[int]]:
    for x in tensors:
        assert x.device.type == "cpu"
        assert x.dtype == torch.int32
    return [x.tolist() for x in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """q [R, H, C] are the last rows of k [S, G, C], v [S, G, V] → [R, H, V] in fp64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("rhc,shc->hrs", q.double(), k) * scale
    if causal:
        rows, length = q.shape[0], k.shape[0]
        hidden = torch.arange(length)[None] > torch.arange(length - rows, length)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hrs,shv->rhv", scores.softmax(-1), v)


class Wrapper:
    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        self.plans = 0

    def check(self, q: Tensor, k: Tensor, starts: list[int]) -> None:
        assert q.dtype == k.dtype == self.dtype
        assert q.shape[0] == starts[-1], "rows are not as planned"
        assert all(x.stride(-1) == 1 for x in (q, k))


class Paged(Wrapper):
    """Prefill and decode over (keys, values), [blocks, block_size, G, C] each."""

    def plan(
        self,
        starts: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        max_token_per_sequence: int | None = None,
    ) -> None:
        [self.starts] = host(starts)
        assert max_token_per_sequence in (None, max(b - a for a, b in pairwise(self.starts)))
        self.shapes = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.page_size, self.causal, self.scale, self.dtype = page_size, causal, sm_scale, q_data_type
        self.buffers = indptr, indices, last
        self.plans += 1

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        self.check(q, cache[0], self.starts)
        assert (q.shape[1], cache[0].shape[2], q.shape[2]) == self.shapes
        assert cache[0].shape[1] == self.page_size
        indptr, indices, last = host(*self.buffers)
        for r, (start, stop) in enumerate(pairwise(self.starts)):
            blocks = indices[indptr[r] : indptr[r + 1]]
            length = (len(blocks) - 1) * self.page_size + last[r]
            k, v = (x[blocks].flatten(0, 1)[:length] for x in cache)
            out[start:stop] = attend(q[start:stop], k, v, self.scale, self.causal)


class Prefill(Paged):
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"
        super().__init__(workspace)


class Decode(Paged):
    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert layout == "NHD"
        super().__init__(workspace)
        self.own = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.captured = use_cuda_graph

    def plan(  # type: ignore[override]
        self, indptr: Tensor, indices: Tensor, last: Tensor, *, head_dim: int, **options: Any
    ) -> None:
        starts = torch.arange(len(last) + 1, dtype=torch.int32)
        super().plan(starts, indptr, indices, last, head_dim_qk=head_dim, causal=False, **options)
        if self.captured:
            self.buffers = self.own  # type: ignore[assignment]


def fast_decode_plan(wrapper: Decode, indptr: Tensor, indices: Tensor, last: Tensor, **options: Any) -> None:
    assert wrapper.captured
    assert wrapper.plans, "it needs the kernels of an earlier plan"
    host(indptr, indices, last)
    wrapper.plan(indptr, indices, last, **options)


class Latent(Wrapper):
    """Absorbed latent attention; as the real one it keeps lengths in its own workspace and reads `kv_indices`."""

    def __init__(
        self,
        workspace: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
    ) -> None:
        super().__init__(workspace)
        self.own = kv_indices if use_cuda_graph else None
        if use_cuda_graph:
            assert qo_indptr is not None
            assert kv_indptr is not None
            assert kv_len_arr is not None
            assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1

    def plan(
        self,
        starts: Tensor,
        indptr: Tensor,
        indices: Tensor,
        lens: Tensor,
        *,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.starts, self.indptr, self.lens = host(starts, indptr, lens)
        self.shapes = (num_heads, head_dim_ckv, head_dim_kpe)
        self.page_size, self.causal, self.scale, self.dtype = page_size, causal, sm_scale, q_data_type
        self.indices = indices if self.own is None else self.own
        self.indices[: len(indices)] = indices
        self.plans += 1

    def run(self, q: Tensor, q_rotated: Tensor, latents: Tensor, rotated: Tensor, *, out: Tensor) -> None:
        self.check(q, latents, self.starts)
        assert (q.shape[1], q.shape[2], q_rotated.shape[2]) == self.shapes
        assert latents.shape[1] == self.page_size
        query = torch.cat((q, q_rotated), dim=-1)
        for r, (start, stop) in enumerate(pairwise(self.starts)):
            blocks = self.indices[self.indptr[r] : self.indptr[r + 1]].tolist()
            c, p = (x[blocks].flatten(0, 1)[: self.lens[r], None] for x in (latents, rotated))
            out[start:stop] = attend(query[start:stop], torch.cat((c, p), dim=-1), c, self.scale, self.causal)


class Ragged(Wrapper):
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"
        super().__init__(workspace)

    def plan(
        self,
        starts: Tensor,
        contexts: Tensor,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.starts, self.contexts = host(starts, contexts)
        self.shapes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        self.causal, self.scale, self.dtype = causal, sm_scale, q_data_type
        self.plans += 1

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> None:
        self.check(q, k, self.starts)
        assert k.shape[0] == v.shape[0] == self.contexts[-1]
        assert (q.shape[1], k.shape[1], q.shape[2], v.shape[2]) == self.shapes
        for (start, stop), (first, end) in zip(pairwise(self.starts), pairwise(self.contexts), strict=True):
            out[start:stop] = attend(q[start:stop], k[first:end], v[first:end], self.scale, self.causal)


def store_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    kept = slots >= 0
    storage.write_kv(cache, key[: len(slots)][kept], value[: len(slots)][kept], slots[kept])


def store_latent(cache: Tensor, latent: Tensor, slots: Tensor) -> None:
    kept = slots >= 0
    storage.write_latent(cache, latent[: len(slots)][kept], slots[kept])


@contextmanager
def installed() -> Iterator[None]:
    """`import flashinfer` finds the stand-in, and Hocket's own Triton kernels are plain functions."""
    library: Any = types.ModuleType("flashinfer")
    library.BatchPrefillWithPagedKVCacheWrapper = Prefill
    library.BatchDecodeWithPagedKVCacheWrapper = Decode
    library.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    library.BatchMLAPagedAttentionWrapper = Latent
    library.fast_decode_plan = fast_decode_plan
    store: Any = types.ModuleType("hocket.attention.store")
    store.store_kv, store.store_latent = store_kv, store_latent
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", library)
        patch.setitem(sys.modules, "hocket.attention.store", store)
        if "HOCKET_MLA_DECODE" not in os.environ:
            patch.setenv("HOCKET_MLA_DECODE", "flashinfer")
        yield
