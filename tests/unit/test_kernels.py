"""Kernels: a row's result in any company, bit by bit. PyTorch's own are the control: they do depend on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import paged
import pytest
import torch
import torch.nn.functional as F
from checkpoints import CONFIGS, make
from torch import Tensor

from hocket.config.model import ModelConfig, RopeConfig
from hocket.errors import BackendUnavailable, ConfigError
from hocket.layers.kernels import MAX_ROWS, PLAIN, ROWS, Kernels, TiledKernels, rows_are_alike
from hocket.layers.linear import Linear
from hocket.layers.rotary import RotaryEmbedding
from hocket.models.backends import backends_for, check_batch_invariance, fastest_kernels

TILED = TiledKernels()
MOST = 300
COUNTS = (*range(1, 34), 47, 48, 49, 64, 100, 127, 128, 129, 144, 200, 255, 256, 257, 299, MOST)
# (in, out) of the test models and of `tiny`, and a few that no model has.
WIDTHS = (
    (64, 136), (64, 168), (64, 96), (96, 64), (64, 64), (32, 112), (24, 96), (32, 64), (64, 16), (64, 7), (64, 512),
    (192, 272), (192, 1024), (512, 192), (64, 256), (192, 128), (192, 16), (192, 2048), (7, 33), (31, 31), (1024, 40),
)  # fmt: skip


def num_unlike(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """For how many numbers of rows at the end of x [MOST, …] some row is not what it is alone."""
    alone = torch.cat([function(x[i : i + 1]) for i in range(MOST)])
    return sum(not torch.equal(function(x[MOST - n :]), alone[MOST - n :]) for n in COUNTS)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_linear(threads: int, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(MOST, widths[0]), torch.randn(widths[1], widths[0]), torch.randn(widths[1])
    for given in (None, bias):
        assert num_unlike(lambda x, b=given: TILED.linear(x, weight, b), x) == 0  # type: ignore[misc]
        torch.testing.assert_close(TILED.linear(x, weight, given), F.linear(x, weight, given))
    assert TILED.linear(x[:0], weight, bias).shape == (0, widths[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_in_few_bits(dtype: torch.dtype) -> None:
    x, weight = torch.randn(MOST, 192).to(dtype), torch.randn(384, 192).to(dtype)
    assert num_unlike(lambda x: TILED.linear(x, weight), x) == 0


@pytest.mark.parametrize("shape", [(4, 16, 32), (4, 32, 12), (4, 32, 64), (4, 64, 32), (3, 24, 10)], ids=str)
def test_per_head(threads: int, shape: tuple[int, int, int]) -> None:
    heads, inner, outer = shape
    x, weight = torch.randn(MOST, heads, inner), torch.randn(heads, outer, inner).transpose(1, 2)
    assert num_unlike(lambda x: TILED.per_head(x, weight), x) == 0
    torch.testing.assert_close(TILED.per_head(x, weight), PLAIN.per_head(x, weight))


@pytest.mark.parametrize("width", [1, 7, 16, 31, 96, 200])
@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_elementwise(threads: int, name: str, width: int) -> None:
    """The widest has more elements than PyTorch gives to one thread."""
    x = torch.randn(MOST, width)
    assert num_unlike(getattr(TILED, name), x) == 0
    gate = torch.randn(MOST, 2 * width).chunk(2, dim=-1)[0]  # not contiguous, as in the gated blocks
    assert num_unlike(getattr(TILED, name), gate) == 0
    torch.testing.assert_close(getattr(TILED, name)(gate), getattr(PLAIN, name)(gate))


def test_pytorchs_own_depend_on_the_number_of_rows() -> None:
    """Without this the tests above could not fail."""
    torch.manual_seed(0)
    weight, heads = torch.randn(96, 64), torch.randn(4, 16, 32)
    assert num_unlike(lambda x: PLAIN.linear(x, weight), torch.randn(MOST, 64)) > 0
    assert num_unlike(lambda x: PLAIN.per_head(x, heads), torch.randn(MOST, 4, 16)) > 0
    assert num_unlike(PLAIN.silu, torch.randn(MOST, 31)) > 0
    assert num_unlike(PLAIN.sigmoid, torch.randn(MOST, 7)) > 0


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", ["v2", "v2-yarn", "v3-halves", "qwen3"])
def test_rotation(threads: int, name: str, heads: int) -> None:
    rope = ModelConfig.from_dict(CONFIGS[name]).rope
    x, rows = torch.randn(MOST, heads, rope.dim), torch.arange(MOST)
    exact, plain = RotaryEmbedding(rope, paged.CPU, exact=True), RotaryEmbedding(rope, paged.CPU)
    assert num_unlike(lambda rows: exact(rows, MOST - 1).rotate(x[rows]), rows) == 0
    torch.testing.assert_close(exact(rows, MOST).rotate(x), plain(rows, MOST).rotate(x), atol=1e-6, rtol=1e-6)
    if name == "v2" and heads == 1:
        assert num_unlike(lambda rows: plain(rows, MOST - 1).rotate(x[rows]), rows) > 0, "the control"


@pytest.mark.parametrize("dim", [2, 8, 20, 64])
def test_angles_do_not_depend_on_how_long_the_table_is(threads: int, dim: int) -> None:
    config = RopeConfig(rope_type="default", theta=10000.0, dim=dim, interleaved=False)
    tables = []
    for longest in (5, 127, 128, 4099, 9000):
        rotary = RotaryEmbedding(config, paged.CPU)
        rotary.reserve(longest)
        tables.append(rotary(torch.arange(5), 4).rotate(torch.ones(5, 1, dim)))
        assert rotary(torch.tensor([longest - 1]), longest - 1).cos is not None
    assert all(torch.equal(table, tables[0]) for table in tables)


def by_count(x: Tensor) -> Tensor:
    return x * (1 + 2.0**-23 * (len(x) > 64))


def by_place(x: Tensor) -> Tensor:
    return x + torch.arange(len(x)).remainder(ROWS)[:, None]


@pytest.mark.parametrize("wrong", [by_count, by_place])
def test_the_check_sees_rows_that_are_not_alike(wrong: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(MAX_ROWS, 8)
    assert rows_are_alike(lambda rows: 2 * rows, x)
    assert not rows_are_alike(wrong, x)


@pytest.mark.parametrize("name", ["v2", "v3-halves", "qwen3-yarn"])
def test_models_are_checked_at_start(name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product of a model is tried: where one shape is wrong the model is refused, and the product is named."""
    backends = backends_for("tiled", deterministic=True)
    model = paged.load(make(name, checkpoints), experts_backend="tiled", backends=backends)
    tried: set[tuple[int, ...]] = set()
    right = {"linear": TiledKernels.linear, "per_head": TiledKernels.per_head}

    def spy(kind: str) -> Callable[..., Tensor]:
        def run(self: Kernels, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
            tried.add(tuple(weight.shape))
            return right[kind](self, x, weight, *rest)  # type: ignore[operator, no-any-return]

        return run

    for kind in right:
        monkeypatch.setattr(TiledKernels, kind, spy(kind))
    check_batch_invariance(model, backends.kernels)
    in_check, _ = set(tried), tried.clear()
    paged.PagedRun(model).step([("a", [5, 6, 7])])
    assert tried == in_check & tried
    assert len(tried) > 5
    for shape in tried:
        for kind in right:

            def wrong(self: Kernels, x: Tensor, weight: Tensor, *rest: Tensor, kind: str = kind) -> Tensor:
                out: Tensor = right[kind](self, x, weight, *rest)  # type: ignore[operator]
                return by_count(out) if tuple(weight.shape) == shape else out  # noqa: B023

            monkeypatch.setattr(TiledKernels, kind, wrong)
        with pytest.raises(BackendUnavailable, match=" × ".join(map(str, shape))):
            check_batch_invariance(model, backends.kernels)


def test_a_layer_with_other_kernels_is_found(checkpoints: Path) -> None:
    backends = backends_for("tiled", deterministic=True)
    model = paged.load(make("v3", checkpoints), experts_backend="tiled", backends=backends)
    model.layers[2].attention.q_b = Linear(24, 96, device=paged.CPU, dtype=torch.float32)  # type: ignore[union-attr]
    with pytest.raises(BackendUnavailable, match=r"layers\.2\.attention\.q_b was not built with"):
        check_batch_invariance(model, backends.kernels)


def test_which_kernels_a_device_gets(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Plain ones on a CPU, and on a GPU without triton, which is then said."""
    gpu = torch.device("cuda")
    for name in [name for name in sys.modules if name.startswith("hocket.layers.triton_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fastest_kernels(paged.CPU) is PLAIN
    assert not caplog.records
    assert fastest_kernels(gpu) is PLAIN
    assert "not fused" in caplog.text
    caplog.clear()
    monkeypatch.setenv("HOCKET_KERNELS", "torch")
    assert fastest_kernels(gpu) is PLAIN
    assert not caplog.records
    monkeypatch.setenv("HOCKET_KERNELS", "fast")
    with pytest.raises(ConfigError, match="auto, torch"):
        fastest_kernels(paged.CPU)
