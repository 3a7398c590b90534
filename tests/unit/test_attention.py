"""Paged attention against a plain one written from the definition; unwritten pages and padding rows are NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_flashinfer
import pytest
import torch
from attention_steps import Step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.attention.backend import AttentionBackend
from hocket.attention.base import AttentionMetadata
from hocket.attention.flashinfer import FlashInferAttention
from hocket.attention.flashinfer_library import HeadShapes
from hocket.attention.plan import MAX_GATHERED_BYTES, plan_attention
from hocket.attention.registry import attention_backend
from hocket.attention.sdpa import paged_attention
from hocket.config.backends import CPU_ATTENTION
from hocket.config.model import MLAConfig

NAN = float("nan")
SCALE = 0.3
Backend = AttentionBackend[Any]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    requests = draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 2, 3, 9])), min_size=1, max_size=5))
    return Step(
        past=[p for p, _ in requests],
        new=[n for _, n in requests],
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        num_padding=draw(st.sampled_from([0, 0, 1, 4])),
        slot_bytes=draw(st.sampled_from([1, 1, MAX_GATHERED_BYTES // 25, MAX_GATHERED_BYTES])),
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [L, H, C] are the last L of the S rows of key [S, H, C], value [S, H, V]; [L, H · V] in fp64."""
    rows, length = query.shape[0], key.shape[0]
    scores = torch.einsum("lhc,shc->hls", query.double(), key.double()) * SCALE
    visible = torch.arange(length)[None] <= torch.arange(length - rows, length)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hls,shv->lhv", weights, value.double()).flatten(1)


def with_padding(rows: Tensor, count: int) -> Tensor:
    """`rows` and `count` more of NaN."""
    return torch.cat((rows, torch.full((count, *rows.shape[1:]), NAN)))


def build(backend: str, num_heads: int, num_kv_heads: int, head_dim: int, mla: MLAConfig | None = None) -> Backend:
    if backend in CPU_ATTENTION:
        return attention_backend(backend)
    heads = HeadShapes(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=SCALE, mla=mla)
    return FlashInferAttention(heads, torch.device("cpu"))


def mla_of(widths: tuple[int, int, int, int]) -> MLAConfig:
    plain, rotated, value_width, latent_width = widths
    return MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=latent_width,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotated,
        v_head_dim=value_width,
    )


WIDTHS = st.sampled_from([(8, 4, 6, 16), (6, 2, 8, 12), (4, 4, 10, 8)])
"""N, P, V, L."""


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    """FlashInfer's kernels are those of `fake_flashinfer`."""
    with fake_flashinfer.installed():
        yield


backends = pytest.mark.parametrize("backend", [*CPU_ATTENTION, "flashinfer"])
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@backends
@relaxed
@given(step=steps(), heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]))
def test_grouped_query_attention(backend: str, step: Step, heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(1)
    meta = step.metadata(generator)
    cache = torch.full((2, step.num_blocks, step.block_size, num_kv_heads, 8), NAN)
    flat = cache.view(2, -1, num_kv_heads, 8)
    contexts = [torch.randn(2, n, num_kv_heads, 8, generator=generator) for n in meta.seq_lens_cpu]
    for r, past in enumerate(step.past):
        flat[:, step.slots_of(meta, r, past)] = contexts[r][:, :past]
    query = torch.randn(meta.num_tokens, num_heads, 8, generator=generator)
    new = torch.cat([c[:, past:] for c, past in zip(contexts, step.past, strict=True)], dim=1)

    pad = step.num_padding
    attention = build(backend, num_heads, num_kv_heads, 8)
    plan = attention.plan(meta, meta.num_tokens + pad, step.block_size, torch.float32, slot_bytes=step.slot_bytes)
    key, value = with_padding(new[0], pad), with_padding(new[1], pad)
    out = attention.grouped_query(with_padding(query, pad), key, value, cache, plan, SCALE)

    assert out.shape == (meta.num_tokens + pad, num_heads * 8)
    assert (out[meta.num_tokens :] == 0).all()
    starts = meta.query_start_loc_cpu
    for r, context in enumerate(contexts):
        k, v = context.repeat_interleave(num_heads // num_kv_heads, dim=2)
        torch.testing.assert_close(
            out[starts[r] : starts[r + 1]].double(),
            plain_attention(query[starts[r] : starts[r + 1]], k, v),
            atol=2e-6,
            rtol=0,
        )
        assert torch.equal(flat[:, step.slots_of(meta, r, context.shape[1])], context)
    assert int(flat.isfinite().all(dim=-1)[0, :, 0].sum()) == sum(meta.seq_lens_cpu), "a foreign slot was written"


@backends
@relaxed
@given(step=steps(), widths=WIDTHS)
def test_latent_attention(backend: str, step: Step, widths: tuple[int, int, int, int]) -> None:
    check_latent(build(backend, 3, 3, widths[0] + widths[1], mla_of(widths)), step, widths)


@relaxed
@given(step=steps(), widths=WIDTHS, rows=st.integers(1, 3), tokens=st.integers(1, 40), tiles=st.integers(1, 4))
def test_latents_in_many_groups(
    step: Step, widths: tuple[int, int, int, int], rows: int, tokens: int, tiles: int
) -> None:
    """Chunks with a past are expanded, absorbed where they are too long, and what is too much for a call is cut."""
    attention = build("flashinfer", 3, 3, widths[0] + widths[1], mla_of(widths))
    expanded_bytes = 3 * (2 * widths[0] + widths[1] + widths[2]) * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.attention.paging.ABSORBED_ROWS", rows)
        patch.setattr("hocket.attention.paging.MAX_TILES", tiles)
        patch.setattr("hocket.attention.paging.ROWS_PER_TILE", 3)
        patch.setattr("hocket.attention.flashinfer.MAX_EXPANDED_BYTES", tokens * expanded_bytes)
        check_latent(attention, step, widths)


def check_latent(attention: Backend, step: Step, widths: tuple[int, int, int, int]) -> None:
    plain, rotated, value_width, latent_width = widths
    num_heads = 3
    generator = torch.Generator().manual_seed(2)
    meta = step.metadata(generator)
    cache = torch.full((step.num_blocks, step.block_size, latent_width + rotated), NAN)
    flat = cache.view(-1, latent_width + rotated)
    contexts = [torch.randn(n, latent_width + rotated, generator=generator) for n in meta.seq_lens_cpu]
    for r, past in enumerate(step.past):
        flat[step.slots_of(meta, r, past)] = contexts[r][:past]
    query = torch.randn(meta.num_tokens, num_heads, plain + rotated, generator=generator)
    kv_b = torch.randn(num_heads, plain + value_width, latent_width, generator=generator) * latent_width**-0.5
    new = torch.cat([c[past:] for c, past in zip(contexts, step.past, strict=True)])

    pad = step.num_padding
    plan = attention.plan(meta, meta.num_tokens + pad, step.block_size, torch.float32, slot_bytes=step.slot_bytes)
    out = attention.latent(with_padding(query, pad), with_padding(new, pad), kv_b, cache, plan, SCALE)

    assert out.shape == (meta.num_tokens + pad, num_heads * value_width)
    assert (out[meta.num_tokens :] == 0).all()
    starts = meta.query_start_loc_cpu
    for r, context in enumerate(contexts):
        expanded = torch.einsum("hwl,sl->shw", kv_b.double(), context[:, :latent_width].double())
        shared = context[:, None, latent_width:].double().expand(-1, num_heads, -1)
        key = torch.cat((expanded[..., :plain], shared), dim=-1)
        torch.testing.assert_close(
            out[starts[r] : starts[r + 1]].double(),
            plain_attention(query[starts[r] : starts[r + 1]], key, expanded[..., plain:]),
            atol=5e-6,
            rtol=0,
        )
        assert torch.equal(flat[step.slots_of(meta, r, context.shape[0])], context)


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(past=[5, 0], new=[11, 4], block_size=4, num_padding=0)
    outs = []
    for rows in (1024, 4):
        monkeypatch.setattr("hocket.attention.plan.MAX_TILE_ROWS", rows)
        generator = torch.Generator().manual_seed(3)
        meta = step.metadata(generator)
        cache = torch.randn(2, step.num_blocks, 4, 2, 8, generator=generator)
        query, key, value = (torch.randn(15, h, 8, generator=generator) for h in (4, 2, 2))
        plan = plan_attention(meta, 15, 4, torch.float32)
        outs.append(paged_attention(query, key, value, cache, plan, SCALE))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-6, rtol=0)


@backends
def test_no_tokens_at_all(backend: str) -> None:
    meta = AttentionMetadata(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros(0, 1, dtype=torch.int32),
        block_table_cpu=torch.zeros(0, 1, dtype=torch.int32),
        slot_mapping=torch.full((3,), -1),
        query_start_loc_cpu=(0,),
        seq_lens_cpu=(),
        max_query_len=0,
        max_seq_len=0,
        num_tokens=0,
    )
    attention = build(backend, 4, 2, 8)
    plan = attention.plan(meta, 3, 4, torch.float32, slot_bytes=128)
    query, key = torch.full((3, 4, 8), NAN), torch.full((3, 2, 8), NAN)
    out = attention.grouped_query(query, key, key, torch.full((2, 2, 4, 2, 8), NAN), plan, SCALE)
    assert torch.equal(out, torch.zeros(3, 32))
