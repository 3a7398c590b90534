"""Experts backends on a GPU against a loop in fp32 over bf16 weights, in the shapes of the models they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gpus import missing
from torch import Tensor

from hocket.errors import BackendUnavailable
from hocket.moe.experts.base import Experts
from hocket.moe.experts.registry import experts_class
from hocket.moe.experts.tile_config import tile_config
from hocket.moe.experts.triton_grouped import grouped_mlp
from hocket.moe.transport.rows import RowFormat
from hocket.overlap.sm_budget import Limit
from hocket.overlap.sm_limits import limit_experts
from hocket.quant import fp8

CUDA = torch.device("cuda")
BACKENDS = ("triton_grouped", "deep_gemm", "grouped_mm")


@dataclass(frozen=True)
class Shape:
    """Experts of this rank and of all, widths, experts per token."""

    num_local: int
    num_experts: int
    hidden_size: int
    inter: int
    top_k: int


SHAPES = {
    "v2-lite": Shape(32, 64, 2048, 1408, 6),
    "v3-slice": Shape(8, 16, 7168, 2048, 8),
    "qwen3": Shape(64, 128, 2048, 768, 8),
}
Case = tuple[Tensor, Tensor, Tensor]


def make(backend: str, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Experts:
    try:
        kind = experts_class(backend)
    except BackendUnavailable as error:
        missing(str(error))
    reason = kind.unsupported_reason(shape.hidden_size, shape.inter, dtype)
    if reason is not None:
        pytest.skip(reason)
    sizes = shape.num_local, shape.hidden_size, shape.inter
    return kind(*sizes, num_experts=shape.num_experts, device=CUDA, dtype=dtype)


@pytest.fixture(scope="module")
def weights_of() -> dict[Shape, tuple[Tensor, Tensor]]:
    """By shape, w13 and w2 in fp32 that hold bf16 values."""
    return {}


def loaded(backend: str, shape: Shape, store: dict[Shape, tuple[Tensor, Tensor]]) -> Experts:
    experts = make(backend, shape)
    if shape not in store:
        store.clear()  # one shape at a time
        torch.manual_seed(0)
        store[shape] = tuple(
            torch.randn(p.shape, device=CUDA, dtype=torch.bfloat16) * p.shape[-1] ** -0.5 for p in experts.parameters()
        )
    for parameter, weight in zip(experts.parameters(), store[shape], strict=True):
        parameter.data = weight
    return experts


def random_case(shape: Shape, num_rows: int, seed: int = 0, *, pool: int | None = None) -> Case:
    """Rows as they come out of a transport: strided, half of the slots not for this rank, NaN where none is.

    pool: how many of the experts are chosen at all.
    """
    generator = torch.Generator(CUDA).manual_seed(seed)
    layout = RowFormat(shape.hidden_size, shape.top_k, torch.bfloat16)
    x = torch.randn(num_rows, shape.hidden_size, device=CUDA, generator=generator).bfloat16()
    scores = torch.rand(num_rows, pool or shape.num_experts, device=CUDA, generator=generator)
    ids = scores.topk(shape.top_k).indices
    ids = ids.masked_fill(ids >= shape.num_local, -1)
    weights = torch.rand(num_rows, shape.top_k, device=CUDA, generator=generator) / shape.top_k
    x.masked_fill_((ids < 0).all(dim=1, keepdim=True), torch.nan)
    weights.masked_fill_(ids < 0, torch.nan)
    return layout.unpack(layout.pack(x, ids, weights, num_rows))


def expected(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """fp32, one expert after the other."""
    out = torch.zeros(x.shape, device=CUDA)
    for expert in range(experts.num_local_experts):
        rows, slots = torch.where(ids == expert)
        gate, up = F.linear(x[rows].float(), experts.w13[expert].float()).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, experts.w2[expert].float())
        out.index_add_(0, rows, result * weights[rows, slots, None])
    return out


def check(experts: Experts, case: Case, out: Tensor | None = None) -> None:
    x, ids, weights = case
    out = experts(x, ids, weights) if out is None else out
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    wanted = expected(experts, x, ids, weights)
    worst = float((out.float() - wanted).abs().max()) if len(out) else 0.0
    scale = float(wanted.abs().max()) if len(out) else 0.0
    rows = tuple(torch.where(~torch.isclose(out.float(), wanted, atol=0.01 * scale, rtol=0.02).all(dim=1))[0].tolist())
    assert not rows, f"{experts.name}: {len(rows)} of {len(out)} rows differ, {rows[:8]} …; worst {worst} of {scale}"
    assert not out[(ids < 0).all(dim=1)].any(), "a row without experts is zero"


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 128, 512, 513, 4096])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_rows(backend: str, name: str, num_rows: int, weights_of: dict[Shape, tuple[Tensor, Tensor]]) -> None:
    shape = SHAPES[name]
    check(loaded(backend, shape, weights_of), random_case(shape, num_rows, seed=num_rows))


@pytest.mark.parametrize("num_rows", [100, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_loads(backend: str, num_rows: int, weights_of: dict[Shape, tuple[Tensor, Tensor]]) -> None:
    """All rows at one expert, at the last one, at few experts, at none."""
    shape = SHAPES["v2-lite"]
    experts = loaded(backend, shape, weights_of)
    x, ids, weights = random_case(shape, num_rows, pool=8)
    check(experts, (x, ids, weights))
    weights = torch.rand_like(weights)
    x = torch.randn_like(x)
    for only in (0, shape.num_local - 1, -1):
        ids = torch.full_like(ids, -1)
        ids[:, 2] = only
        check(experts, (x, ids, weights))
    check(experts, (torch.full_like(x, torch.nan), torch.full_like(ids, -1), torch.full_like(weights, torch.nan)))


@pytest.mark.parametrize("num_rows", [48, 1500])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_all_experts(backend: str, num_rows: int, weights_of: dict[Shape, tuple[Tensor, Tensor]]) -> None:
    """Where every second expert is here, the same as with its indices; in the ids of received rows, some of them -1."""
    shape = SHAPES["v2-lite"]
    experts = loaded(backend, shape, weights_of)
    local_id_of = torch.arange(shape.num_experts + 1, device=CUDA)
    local_id_of = torch.where(local_id_of % 2 == 1, local_id_of // 2, -1)
    ids = torch.rand(num_rows, shape.num_experts, device=CUDA).topk(shape.top_k).indices
    ids[::5, 1] = -1
    layout = RowFormat(shape.hidden_size, shape.top_k, torch.bfloat16)
    x, weights = torch.randn(num_rows, shape.hidden_size, device=CUDA).bfloat16(), torch.rand_like(ids.float())
    x, ids, weights = layout.unpack(layout.pack(x, ids, weights, num_rows))
    case = x, local_id_of[ids.long()], weights
    out = experts(*case)
    check(experts, case, out)
    experts.local_id_of = local_id_of
    assert torch.equal(experts(x, ids, weights), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_without_experts(backend: str) -> None:
    shape = Shape(0, 64, 2048, 1408, 6)
    x = torch.full((5, 2048), torch.nan, device=CUDA, dtype=torch.bfloat16)
    ids = torch.full((5, 6), -1, device=CUDA)
    out = make(backend, shape)(x, ids, torch.ones(5, 6, device=CUDA))
    assert out.shape == x.shape
    assert not out.any()


@pytest.mark.parametrize("num_rows", [48, 600])
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs(backend: str, num_rows: int, weights_of: dict[Shape, tuple[Tensor, Tensor]]) -> None:
    """Captured once, replayed on rows, ids and weights that nobody had seen, also where fewer experts get any."""
    shape = SHAPES["v2-lite"]
    experts = loaded(backend, shape, weights_of)
    given = [t.clone() for t in random_case(shape, num_rows)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        experts(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*given)
    for seed, pool in ((1, None), (2, 6), (3, 40)):
        fresh = random_case(shape, num_rows, seed, pool=pool)
        for buffer, values in zip(given, fresh, strict=True):
            buffer.copy_(values)
        out.fill_(torch.nan)
        graph.replay()
        check(experts, fresh, out)


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("rows_per_expert", [1, 12, 50, 500])
@pytest.mark.parametrize("name", ["v2-lite", "v3-slice"])
def test_every_block_size(
    name: str, rows_per_expert: float, use_tma: bool, weights_of: dict[Shape, tuple[Tensor, Tensor]]
) -> None:
    """With weights read either way, and a number of rows that the sizes are not for."""
    shape = SHAPES[name]
    experts = loaded("triton_grouped", shape, weights_of)
    config = tile_config(rows_per_expert, 2)
    config = replace(config, gate_up=replace(config.gate_up, use_tma=use_tma))
    config = replace(config, down=replace(config.down, use_tma=use_tma))
    case = random_case(shape, 300, seed=4)
    check(experts, case, grouped_mlp(*case, experts.w13, experts.w2, config))


@pytest.mark.parametrize(("backend", "num_sms"), [("triton_grouped", 1), ("triton_grouped", 40), ("deep_gemm", 120)])
@pytest.mark.parametrize("num_rows", [64, 1024])
def test_fewer_multiprocessors(
    backend: str, num_sms: int, num_rows: int, weights_of: dict[Shape, tuple[Tensor, Tensor]]
) -> None:
    shape = SHAPES["v2-lite"]
    experts = loaded(backend, shape, weights_of)
    limit: Limit = partial(limit_experts, [experts]) if backend == "triton_grouped" else fp8.limit_sms
    undo = limit(num_sms)
    check(experts, random_case(shape, num_rows, seed=9))
    undo()
    assert experts.num_sms is None
    if backend == "deep_gemm":
        import deep_gemm

        assert deep_gemm.get_num_sms() == torch.cuda.get_device_properties().multi_processor_count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [3, 200])
def test_other_dtypes(dtype: torch.dtype, num_rows: int) -> None:
    """triton_grouped in fp32 is as exact as fp32, also in widths that are no multiple of anything."""
    shape = Shape(5, 9, 100, 72, 3)
    experts = make("triton_grouped", shape, dtype)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, device=CUDA) * parameter.shape[-1] ** -0.5)
    x = torch.randn(num_rows, shape.hidden_size, device=CUDA).to(dtype)
    ids = torch.randint(-1, 5, (num_rows, 3), device=CUDA)
    weights = torch.rand(num_rows, 3, device=CUDA)
    limit = 2e-5 if dtype == torch.float32 else 5e-3
    wanted = expected(experts, x, ids, weights)
    torch.testing.assert_close(experts(x, ids, weights).float(), wanted, atol=limit, rtol=limit)


@pytest.mark.parametrize("hidden_size", [2048, 7168, 72])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_rows_of_bytes_are_those_of_a_cpu(hidden_size: int, num_rows: int) -> None:
    """Packed on the GPU and unpacked on both, from strided x, with padding rows."""
    layout = RowFormat(hidden_size, 8, torch.bfloat16)
    x = torch.randn(num_rows, hidden_size + 8, device=CUDA).bfloat16()[:, :hidden_size]
    ids = torch.randint(-1, 256, (num_rows, 8), device=CUDA)
    weights = torch.rand(num_rows, 8, device=CUDA)
    rows = layout.pack(x, ids, weights, num_rows + 5, 2**31 - 1)
    plain = layout.pack(x.cpu(), ids.cpu(), weights.cpu(), num_rows + 5, 2**31 - 1)
    for mine, theirs in zip(layout.unpack(rows), layout.unpack(plain), strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(layout.numbers(rows).cpu(), layout.numbers(plain))
