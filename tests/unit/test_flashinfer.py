"""The FlashInfer backend without FlashInfer: indices, groups of rows, captured plans, and when it is chosen."""

from __future__ import annotations

import gc
import json
import logging
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.attention import flashinfer_library
from hocket.attention.base import AttentionMetadata
from hocket.attention.flashinfer import FlashInferAttention, FlashInferPlan
from hocket.attention.flashinfer_library import HeadShapes, unusable
from hocket.attention.paging import MAX_TILES, Piece, latent_groups, pages, rows_of, slots_of
from hocket.attention.registry import SdpaAttention, attention_backend
from hocket.config.model import MLAConfig, ModelConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import BackendUnavailable, ConfigError
from hocket.layers.rotary import softmax_scale

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MLA = MLAConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SMALL_MLA = MLAConfig(q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=8)


def heads(**changes: Any) -> HeadShapes:
    return HeadShapes(**{"num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "scale": 0.3, **changes})


@pytest.fixture
def stand_in() -> Iterator[None]:
    with fake_flashinfer.installed():
        yield


tables = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 3, 16]))


@given(tables, st.randoms(use_true_random=False))
def test_pages_and_slots(drawn: tuple[list[int], int], random: Any) -> None:
    lens, size = drawn
    blocks = [[random.randrange(1000) for _ in range(-(-n // size))] for n in lens]
    table = np.full((len(lens), max(map(len, blocks)) + 2), -9, dtype=np.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    array = np.array(lens, dtype=np.int32)
    found = pages(table, array, size)
    assert [found.indices[a:b].tolist() for a, b in zip(found.indptr, found.indptr[1:], strict=False)] == blocks
    assert found.last.tolist() == [(n - 1) % size + 1 for n in lens]
    assert {found.indptr.dtype, found.indices.dtype, found.last.dtype} == {np.dtype(np.int32)}
    expected = [own[p // size] * size + p % size for own, n in zip(blocks, lens, strict=True) for p in range(n)]
    assert slots_of(table, array, size).tolist() == expected


def piece(request: int, start: int, stop: int, context: int) -> Piece:
    return Piece(request=request, start=start, stop=stop, context=context)


def test_rows_of_pieces() -> None:
    first, second, third = piece(0, 2, 5, 9), piece(1, 5, 6, 3), piece(2, 8, 10, 2)
    assert rows_of([first, second]) == slice(2, 6)
    rows = rows_of([first, third])
    assert isinstance(rows, np.ndarray)
    assert rows.tolist() == [2, 3, 4, 8, 9]


def test_who_is_absorbed() -> None:
    decode, short, chunk = piece(0, 0, 1, 70), piece(1, 1, 129, 500), piece(2, 129, 258, 500)
    fresh, one, long = piece(3, 258, 300, 42), piece(4, 300, 301, 1), piece(5, 301, 900, 1001)
    absorbed, expanded = latent_groups([decode, short, chunk, fresh, one, long], 16, 1000)
    assert absorbed == [[decode, short, one, long]]
    assert expanded == [[chunk, fresh]]
    assert latent_groups([chunk, fresh], 16, 541)[1] == [[chunk], [fresh]]


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([1, 1, 5, 200, 20000])), min_size=1, max_size=30),
    st.sampled_from([1, 16, 128]),
    st.integers(1, 30000),
)
def test_groups_hold_every_row_once_and_stay_within_limits(
    requests: list[tuple[int, int]], num_heads: int, most: int
) -> None:
    parts, start = [], 0
    for r, (past, new) in enumerate(requests):
        parts.append(piece(r, start, start + new, past + new))
        start += new
    absorbed, expanded = latent_groups(parts, num_heads, most)
    whole = {part.request: part for part in parts}
    rows = []
    for part in (part for group in (*absorbed, *expanded) for part in group):
        rows += range(part.start, part.stop)
        assert part.past == whole[part.request].past + part.start - whole[part.request].start
    assert sorted(rows) == list(range(start))
    assert all(sum(part.context for part in group) <= most for group in expanded)
    for group in absorbed:
        assert sum(-(-part.num_rows * num_heads // 64) for part in group) <= MAX_TILES


class Decodes:
    """Requests of one new token each over a cache that is NaN where nothing was written."""

    def __init__(self, seed: int, lens: list[int], block_size: int, row_shape: tuple[int, ...]) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.lens, self.size = lens, block_size
        counts = [-(-n // block_size) for n in lens]
        order = torch.randperm(sum(counts) + 3, generator=self.generator).to(torch.int32)
        self.table = torch.full((len(lens), max(counts)), -5, dtype=torch.int32)
        for row, own in zip(self.table, order[: sum(counts)].split(counts), strict=True):
            row[: len(own)] = own
        ends = torch.tensor(lens) - 1
        blocks = self.table.gather(1, (ends // block_size)[:, None])[:, 0].long()
        self.slots = blocks * block_size + ends % block_size
        self.contexts = [torch.randn(n, *row_shape, generator=self.generator) for n in lens]
        self.cache = torch.full((len(order), block_size, *row_shape), float("nan"))
        for row, context in zip(self.table, self.contexts, strict=True):
            for position, x in enumerate(context[:-1]):
                self.cache[row[position // block_size], position % block_size] = x

    @property
    def new(self) -> Tensor:
        return torch.stack([context[-1] for context in self.contexts])

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def meta(self) -> AttentionMetadata:
        count = len(self.lens)
        return AttentionMetadata(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=torch.tensor(self.lens, dtype=torch.int32),
            block_table=self.table,
            block_table_cpu=self.table,
            slot_mapping=self.slots,
            query_start_loc_cpu=tuple(range(count + 1)),
            seq_lens_cpu=tuple(self.lens),
            max_query_len=1,
            max_seq_len=max(self.lens),
            num_tokens=count,
        )


def attend(attention: Any, decodes: Decodes, plan: Any, query: Tensor, kv_b: Tensor | None) -> Tensor:
    cache, new = decodes.cache.clone(), decodes.new
    if kv_b is not None:
        return attention.latent(query, new, kv_b, cache, plan, 0.3)
    pair = cache.movedim(2, 0).contiguous()
    return attention.grouped_query(query, new[:, 0], new[:, 1], pair, plan, 0.3)


STEPS = ([5, 1, 30], [1, 1, 1], [16, 17, 15], [64, 3, 33])


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("group", [2, 8])
def test_a_captured_plan_serves_other_requests_on_the_same_addresses(
    stand_in: None, is_latent: bool, group: int
) -> None:
    shapes = heads(num_heads=8, num_kv_heads=8 // group, head_dim=8, mla=SMALL_MLA if is_latent else None)
    attention, size = FlashInferAttention(shapes, CPU), 4
    plan = attention.decode_plan(3, 64, size, torch.float32, slot_bytes=1)
    assert plan.write_slots is not None
    addresses = {name: x.data_ptr() for name, x in plan.buffers.device.items()}
    for seed, lens in enumerate(STEPS):
        decodes = Decodes(seed, lens, size, (14,) if is_latent else (2, 8 // group, 8))
        kv_b = decodes.randn(8, 14, 12) if is_latent else None
        query = decodes.randn(3, 8, 8)
        meta = decodes.meta
        attention.update(plan, meta)
        meta.slot_mapping.fill_(-7)  # the caller's memory may be used again
        found = attend(attention, decodes, plan, query, kv_b)
        reference = Decodes(seed, lens, size, (14,) if is_latent else (2, 8 // group, 8))
        sdpa = SdpaAttention()
        expected = attend(sdpa, reference, sdpa.plan(reference.meta, 3, size, torch.float32, 1), query, kv_b)
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    assert addresses == {name: x.data_ptr() for name, x in plan.buffers.device.items()}
    assert plan.write_slots.data_ptr() == addresses["slots"]


@pytest.mark.parametrize(
    ("asked", "num_heads", "expected"),
    [(None, 16, True), ("flashinfer", 16, False), ("triton", 128, True), ("auto", 32, True), ("auto", 64, False)],
)
def test_whose_kernel_decodes_latents(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, num_heads: int, expected: bool
) -> None:
    monkeypatch.delenv("HOCKET_MLA_DECODE", raising=False)
    if asked is not None:
        monkeypatch.setenv("HOCKET_MLA_DECODE", asked)
    assert heads(num_heads=num_heads, mla=MLA).decodes_latents_with_triton == expected
    assert not heads(num_heads=num_heads).decodes_latents_with_triton
    monkeypatch.setenv("HOCKET_MLA_DECODE", "fa2")
    with pytest.raises(ConfigError, match="auto, triton, flashinfer"):
        _ = heads(num_heads=num_heads, mla=MLA).decodes_latents_with_triton


def test_latents_that_are_stored_already(stand_in: None) -> None:
    """At the places that the backend names; keys and values, and latents of other backends, have none."""
    attention, size, lens = FlashInferAttention(heads(num_heads=8, head_dim=8, mla=SMALL_MLA), CPU), 4, [5, 1, 30]
    decodes = Decodes(0, lens, size, (14,))
    plan, cache = attention.plan(decodes.meta, 3, size, torch.float32, 1), decodes.cache.clone()
    query, kv_b = decodes.randn(3, 8, 8), decodes.randn(8, 14, 12)
    expected = attention.latent(query, decodes.new, kv_b, cache.clone(), plan, 0.3)
    places = attention.places(cache, plan)
    assert places is not None
    places.rows[places.slots] = decodes.new
    before = cache.clone()
    found = attention.latent(query, torch.zeros_like(decodes.new), kv_b, cache, plan, 0.3, is_stored=True)
    assert torch.equal(found, expected)
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    of_heads = FlashInferAttention(heads(num_heads=8, num_kv_heads=4, head_dim=8), CPU)
    pairs = Decodes(0, lens, size, (2, 4, 8))
    plan = of_heads.plan(pairs.meta, 3, size, torch.float32, 1)
    assert of_heads.places(pairs.cache.movedim(2, 0).contiguous(), plan) is None
    sdpa = SdpaAttention()
    assert sdpa.places(cache, sdpa.plan(decodes.meta, 3, size, torch.float32, 1)) is None


def test_a_captured_plan_has_a_fixed_number_of_rows(stand_in: None) -> None:
    attention = FlashInferAttention(heads(num_heads=8, num_kv_heads=4, head_dim=8), CPU)
    plan = attention.decode_plan(4, 64, 4, torch.float32, slot_bytes=1)
    with pytest.raises(AssertionError, match="fixed number of requests"):
        attention.update(plan, Decodes(0, [3, 4, 5], 4, (2, 4, 8)).meta)


def test_plans_that_live_together_share_nothing_and_later_ones_take_what_is_left(stand_in: None) -> None:
    """Two ubatches plan before either attends; a step's wrappers are made once."""
    attention = FlashInferAttention(heads(num_heads=8, num_kv_heads=4, head_dim=8), CPU)

    def planned(decodes: Decodes) -> FlashInferPlan:
        return attention.plan(decodes.meta, len(decodes.lens), 4, torch.float32, 1)

    steps = [Decodes(seed, lens, 4, (2, 4, 8)) for seed, lens in enumerate(STEPS)]
    plans = [planned(decodes) for decodes in steps]
    sdpa = SdpaAttention()
    for decodes, plan in zip(steps, plans, strict=True):
        query = decodes.randn(3, 8, 8)
        expected = attend(sdpa, decodes, sdpa.plan(decodes.meta, 3, 4, torch.float32, 1), query, None)
        torch.testing.assert_close(attend(attention, decodes, plan, query, None), expected, atol=5e-6, rtol=0)
    made = {id(plan.paged[0].wrapper) for plan in plans}
    assert len(made) == len(plans)
    del plan, plans
    gc.collect()
    assert {id(planned(steps[0]).paged[0].wrapper) for _ in range(8)} <= made


QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CONFIG = ModelConfig.from_dict(QWEN)


def test_shapes_of_a_model() -> None:
    shapes = HeadShapes.of(CONFIG)
    assert (shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, shapes.mla) == (8, 2, 64, None)
    assert shapes.scale == softmax_scale(CONFIG) == 0.125


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("changes", "dtype", "why"),
    [
        ({}, torch.bfloat16, None),
        ({"head_dim": 64}, torch.float16, None),
        ({"mla": MLA}, torch.bfloat16, None),
        ({}, torch.float32, "no kernels for float32"),
        ({"head_dim": 96}, torch.bfloat16, "no kernels for heads of 96"),
        ({"mla": SMALL_MLA}, torch.bfloat16, r"value widths of \(12, 2, 6, 8\)"),
    ],
)
def test_what_it_can_run(
    stand_in: None, on_a_gpu: None, changes: dict[str, Any], dtype: torch.dtype, why: str | None
) -> None:
    found = unusable(heads(**changes), dtype, GPU)
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(why, found)


def test_where_it_can_run(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable(heads(), torch.bfloat16, CPU) == "it needs an NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    found = unusable(heads(), torch.bfloat16, GPU)
    assert found is not None
    assert "(7, 5)" in found


def test_auto_takes_it_and_says_why_it_does_not(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(flashinfer_library, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(BackendUnavailable, match=r"'flashinfer' .*No module.*pip install.*available here: sdpa"):
        attention_backend("flashinfer", CONFIG, torch.bfloat16, GPU)
    with caplog.at_level(logging.WARNING):
        assert attention_backend("auto", CONFIG, torch.bfloat16, GPU).name == "sdpa"
    [record] = caplog.records
    assert "sdpa" in record.message
    assert "No module named 'flashinfer'" in record.message


def test_auto_without_a_compiler(
    stand_in: None, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(flashinfer_library, "compile_kernels", fail)
    assert attention_backend("auto", CONFIG, torch.bfloat16, GPU).name == "sdpa"
    assert "cannot be compiled: Could not find nvcc" in caplog.text
    with pytest.raises(BackendUnavailable, match="Could not find nvcc"):
        attention_backend("flashinfer", CONFIG, torch.bfloat16, GPU)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"prefill fa3 128 128", "prefill fa2 128 128"}),
        ({"num_kv_heads": 16}, {"prefill fa3 128 128", "decode 128 128"}),
        ({"mla": MLA}, {"prefill fa3 192 128", "mla fa3 512 64"}),
    ],
)
def test_all_kernels_are_compiled_together(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: set[str]
) -> None:
    built: list[str] = []
    all_at_work = threading.Barrier(len(expected), timeout=10.0)

    def spec(name: str) -> SimpleNamespace:
        def build(verbose: bool) -> None:
            all_at_work.wait()
            built.append(name)

        return SimpleNamespace(is_aot=False, build=build)

    jit = SimpleNamespace(
        gen_batch_prefill_module=lambda backend, q, k, o, i, qk, vo, *rest: spec(f"prefill {backend} {qk} {vo}"),
        gen_batch_decode_module=lambda q, k, o, i, qk, vo, *rest: spec(f"decode {qk} {vo}"),
        gen_batch_mla_module=lambda backend, q, k, o, i, c, p, profile: spec(f"mla {backend} {c} {p}"),
    )
    utils = SimpleNamespace(determine_attention_backend=lambda *a: "fa3", determine_mla_backend=lambda device: "fa3")
    modules = {"flashinfer.jit": jit, "flashinfer.utils": utils}
    monkeypatch.setattr(flashinfer_library, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    said: list[tuple[int, int]] = []
    flashinfer_library.compile_kernels(
        heads(**changes), torch.bfloat16, GPU, lambda done, total: said.append((done, total))
    )
    assert said[-1] == (len(expected), len(expected))
    assert len(built) == len(expected)
    assert set(built) == expected


def test_a_compiler_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is at work until it has had its time; then it is an error, and nobody waits for its thread."""
    never = threading.Event()
    monkeypatch.setattr(flashinfer_library, "SIGN_OF_LIFE_S", 0.02)
    monkeypatch.setattr(flashinfer_library, "COMPILE_LIMIT_S", 0.2)
    said: list[tuple[int, int]] = []
    with pytest.raises(RuntimeError, match=r"the compiler did not end within 0.2 s"):
        flashinfer_library._build(
            [SimpleNamespace(build=lambda verbose: never.wait(20.0)), SimpleNamespace(build=lambda verbose: None)],
            lambda done, total: said.append((done, total)),
        )
    never.set()
    assert said[-1] == (1, 2)
    assert len(said) > 3


def test_on_a_cpu_it_is_refused_before_anything_starts(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with pytest.raises(BackendUnavailable, match=r"'flashinfer' .* NVIDIA GPU.*; available here: sdpa, tiled"):
        resolve(Options(model=str(tmp_path), attention_backend="flashinfer", device="cpu"))
