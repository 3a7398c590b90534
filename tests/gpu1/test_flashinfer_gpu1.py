"""FlashInfer attention on a GPU against scaled_dot_product_attention in fp32; pages nobody wrote and padding are NaN.

How far off bf16 may be is measured: the sdpa backend in bf16 on the same data makes the same roundings.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_steps import Step
from torch import Tensor

from hocket.attention.backend import AttentionBackend
from hocket.attention.base import AttentionMetadata
from hocket.attention.flashinfer import FlashInferAttention
from hocket.attention.flashinfer_library import HeadShapes, compile_kernels, unusable
from hocket.attention.registry import SdpaAttention
from hocket.config.model import MLAConfig

DEVICE = torch.device("cuda", 0)
NAN = float("nan")
DTYPE = torch.bfloat16
MLA = MLAConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def latent(num_heads: int) -> HeadShapes:
    return HeadShapes(num_heads=num_heads, num_kv_heads=num_heads, head_dim=192, scale=192**-0.5, mla=MLA)


SHAPES = {
    "qwen3": HeadShapes(num_heads=32, num_kv_heads=4, head_dim=128, scale=128**-0.5),
    "heads": HeadShapes(num_heads=8, num_kv_heads=4, head_dim=64, scale=0.125),
    "v2-lite": latent(16),
    "v3": latent(128),
}
CUT = [1, 15, 16, 17, 1000]
"""Lengths of contexts around the ends of blocks."""
STEPS = {
    "decode": ([n - 1 for n in CUT], [1] * 5),
    "one decode": ([700], [1]),
    "256 decodes": ([(37 * i) % 400 for i in range(256)], [1] * 256),
    "prefill": ([0] * 5, CUT),
    "one prefill": ([0], [300]),
    "chunks": ([16, 100, 1000, 31, 15], [300, 130, 5, 64, 200]),
    "mixed": ([999, 15, 16, 0, 33, 200, 64], [1, 1, 1, 17, 1, 150, 40]),
}


@pytest.fixture(scope="module", params=SHAPES)
def backend(request: pytest.FixtureRequest) -> FlashInferAttention:
    heads = SHAPES[request.param]
    assert unusable(heads, DTYPE, DEVICE) is None
    compile_kernels(heads, DTYPE, DEVICE)
    return FlashInferAttention(heads, DEVICE)


@pytest.fixture(
    scope="module", params=[(shapes, "flashinfer") for shapes in SHAPES] + [("v2-lite", "triton"), ("v3", "triton")]
)
def capturing(request: pytest.FixtureRequest) -> FlashInferAttention:
    """With either kernel of captured latent decodes."""
    shapes, kernel = request.param
    heads = SHAPES[shapes]
    compile_kernels(heads, DTYPE, DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOCKET_MLA_DECODE", kernel)
        return FlashInferAttention(heads, DEVICE)


@dataclass
class Data:
    """Random queries, contexts and weights of a step in bf16, rows of padding NaN."""

    heads: HeadShapes
    step: Step
    meta: AttentionMetadata
    cache: Tensor
    query: Tensor
    new: Tensor
    kv_b: Tensor | None

    @classmethod
    def draw(cls, heads: HeadShapes, step: Step, seed: int = 0) -> Data:
        meta = step.metadata(torch.Generator().manual_seed(seed), DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(DTYPE)

        row = (576,) if heads.mla else (2, heads.num_kv_heads, heads.head_dim)
        contexts = randn(sum(meta.seq_lens_cpu), *row)
        cache = torch.full((step.num_blocks, step.block_size, *row), NAN, device=DEVICE, dtype=DTYPE)
        past, new, first = [], [], 0
        for length, count in zip(meta.seq_lens_cpu, step.new, strict=True):
            past += range(first, first + length - count)
            new += range(first + length - count, first + length)
            first += length
        slots = [slot for r, count in enumerate(step.past) for slot in step.slots_of(meta, r, count)]
        cache.flatten(0, 1)[torch.tensor(slots, dtype=torch.int64)] = contexts[past]
        padding = torch.full((step.num_padding, *row), NAN, device=DEVICE, dtype=DTYPE)
        query = randn(meta.num_tokens + step.num_padding, heads.num_heads, heads.head_dim)
        query[meta.num_tokens :] = NAN
        return cls(
            heads=heads,
            step=step,
            meta=meta,
            cache=cache if heads.mla else cache.movedim(2, 0).contiguous(),
            query=query,
            new=torch.cat((contexts[new], padding)),
            kv_b=randn(heads.num_heads, 256, 512) * 512**-0.5 if heads.mla else None,
        )

    def attend(self, attention: AttentionBackend[Any], plan: Any = None, dtype: torch.dtype = DTYPE) -> Tensor:
        """[T, H · V] of a fresh copy of the cache; without a plan one is made."""
        cache, query, new = (x.to(dtype) for x in (self.cache.clone(), self.query, self.new))
        if plan is None:
            plan = attention.plan(self.meta, len(query), self.step.block_size, dtype, slot_bytes=2 * new[0].numel())
        if self.kv_b is None:
            return attention.grouped_query(query, new[:, 0], new[:, 1], cache, plan, self.heads.scale)
        return attention.latent(query, new, self.kv_b.to(dtype), cache, plan, self.heads.scale)


def check(found: Tensor, data: Data) -> None:
    """Real rows are as near to fp32 as sdpa in bf16 is, all padding rows finite."""
    sdpa, rows = SdpaAttention(), data.meta.num_tokens
    assert found.dtype == DTYPE
    assert found.isfinite().all(), f"{int((~found.isfinite()).any(dim=1).sum())} of {len(found)} rows are not finite"
    exact = data.attend(sdpa, dtype=torch.float32)[:rows]
    assert found[rows:].shape == (data.step.num_padding, exact.shape[1])
    allowed = (data.attend(sdpa)[:rows].float() - exact).abs()
    off = (found[:rows].float() - exact).abs()
    worst = int(off.amax(dim=1).argmax())
    print(f"max error {off.max():.5f} (sdpa {allowed.max():.5f}), mean {off.mean():.6f} (sdpa {allowed.mean():.6f})")
    where = f"row {worst} of {rows}, past {data.step.past[:8]}, new {data.step.new[:8]}"
    assert off.max() <= 2 * allowed.max() + 1e-3, f"max error {off.max()} against sdpa's {allowed.max()} at {where}"
    assert off.mean() <= 1.5 * allowed.mean() + 1e-5, f"mean error {off.mean()} against sdpa's {allowed.mean()}"


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kind", STEPS)
def test_as_sdpa(backend: FlashInferAttention, kind: str, block_size: int) -> None:
    past, new = STEPS[kind]
    padding = 3 if block_size == 64 else 0
    data = Data.draw(backend._heads, Step(past, new, block_size, padding))
    check(data.attend(backend), data)
    check(data.attend(backend), data)  # with wrappers that a step left


def test_everything_is_stored(backend: FlashInferAttention) -> None:
    """In the rows' own slots and nowhere else; rows of slot −1 nowhere."""
    data = Data.draw(backend._heads, Step(*STEPS["mixed"], block_size=16, num_padding=2))
    data.meta.slot_mapping[1] = -1
    plan = backend.plan(data.meta, len(data.query), 16, DTYPE, slot_bytes=1)
    cache = data.cache.clone()
    if data.kv_b is None:
        backend.grouped_query(data.query, data.new[:, 0], data.new[:, 1], cache, plan, data.heads.scale)
        found, expected = cache.flatten(1, 2), data.cache.clone().flatten(1, 2)
    else:
        backend.latent(data.query, data.new, data.kv_b, cache, plan, data.heads.scale)
        found, expected = cache.flatten(0, 1)[None], data.cache.clone().flatten(0, 1)[None]
    for row, slot in enumerate(data.meta.slot_mapping.tolist()):
        if slot >= 0:
            expected[:, slot] = data.new[row] if data.kv_b is None else data.new[row][None]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("kind", ["chunks", "mixed", "prefill"])
@pytest.mark.parametrize("backend", ["v2-lite", "v3"], indirect=True)
def test_latents_that_are_too_many_to_expand(
    backend: FlashInferAttention, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("hocket.attention.flashinfer.MAX_EXPANDED_BYTES", 400 * backend._heads.num_heads * 448 * 2)
    monkeypatch.setattr("hocket.attention.paging.MAX_TILES", backend._heads.num_heads)
    monkeypatch.setattr("hocket.attention.paging.ABSORBED_ROWS", 20)
    data = Data.draw(backend._heads, Step(*STEPS[kind], block_size=16, num_padding=1))
    check(data.attend(backend), data)


@pytest.mark.parametrize("kind", STEPS)
def test_nothing_waits_for_the_gpu(backend: FlashInferAttention, kind: str) -> None:
    data = Data.draw(backend._heads, Step(*STEPS[kind], block_size=16, num_padding=0))
    before = data.attend(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        after = data.attend(backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(after, before, atol=1e-3, rtol=0.02)


REPLAYS = [[1, 1, 1, 1, 1, 1, 1, 1], [1000, 17, 16, 15, 1, 1, 1, 1], [64, 65, 3, 900, 128, 31, 1, 1], [5] * 8]


@pytest.mark.parametrize("size", [16, 64])
def test_a_captured_decode_serves_other_requests(capturing: FlashInferAttention, size: int) -> None:
    heads, most = capturing._heads, 1024
    steps = [
        Data.draw(heads, Step([n - 1 for n in lens], [1] * 8, size, 0), seed) for seed, lens in enumerate(REPLAYS, 1)
    ]
    shape = list(steps[0].cache.shape)
    axis = 1 if heads.mla is None else 0
    shape[axis] = max(data.cache.shape[axis] for data in steps)
    cache = torch.full(shape, NAN, device=DEVICE, dtype=DTYPE)
    query, new = torch.empty_like(steps[0].query), torch.empty_like(steps[0].new)
    kv_b = None if steps[0].kv_b is None else torch.empty_like(steps[0].kv_b)
    plan = capturing.decode_plan(8, most, size, DTYPE, slot_bytes=1)

    def attend() -> Tensor:
        if kv_b is None:
            return capturing.grouped_query(query, new[:, 0], new[:, 1], cache, plan, heads.scale)
        return capturing.latent(query, new, kv_b, cache, plan, heads.scale)

    def load(data: Data) -> None:
        cache.fill_(NAN)
        cache.narrow(axis, 0, data.cache.shape[axis]).copy_(data.cache)
        query.copy_(data.query)
        new.copy_(data.new)
        if kv_b is not None:
            kv_b.copy_(data.kv_b)
        capturing.update(plan, data.meta)

    load(steps[0])
    attend()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = attend()
    for data in (*steps, *reversed(steps)):
        load(data)
        graph.replay()
        check(out.clone(), data)


def test_a_plan_is_changed_while_the_gpu_is_behind(capturing: FlashInferAttention) -> None:
    """Updates follow each other without a wait: no plan's memory on the host is written before it was copied."""
    heads = capturing._heads
    steps = [Data.draw(heads, Step([n - 1 for n in lens], [1] * 8, 16, 0), seed) for seed, lens in enumerate(REPLAYS)]
    plan = capturing.decode_plan(8, 1024, 16, DTYPE, slot_bytes=1)
    capturing.update(plan, steps[0].meta)
    steps[0].attend(capturing, plan)
    torch.cuda.synchronize()
    slots = torch.zeros(8, dtype=torch.int64, pin_memory=True)  # the caller's, written anew for each step
    metas = [dataclasses.replace(data.meta, slot_mapping=slots) for data in steps]
    own_slots = [data.meta.slot_mapping.cpu() for data in steps]
    found = []
    for data, meta, own in zip(steps * 2, metas * 2, own_slots * 2, strict=True):
        torch.cuda._sleep(2_000_000)
        slots.copy_(own)
        capturing.update(plan, meta)
        slots.fill_(-1)
        found.append(data.attend(capturing, plan))
    for out, data in zip(found, steps * 2, strict=True):
        check(out, data)
