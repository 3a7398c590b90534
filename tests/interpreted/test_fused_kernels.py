"""Fused kernels, interpreted, in fp32: masks, odd sizes, no rows, rows of NaN, and models made of them."""

from __future__ import annotations

import importlib
from itertools import pairwise

import fake_flashinfer
import fused_cases as cases
import paged
import pytest
import torch
from checkpoints import CONFIGS
from fused_cases import Draw

from hocket.attention.flashinfer import FlashInferAttention
from hocket.attention.flashinfer_library import HeadShapes
from hocket.config.model import ModelConfig
from hocket.layers.kernels import PLAIN, Kernels
from hocket.layers.triton_kernels import TritonKernels
from hocket.layers.triton_routing import _logits
from hocket.models.backends import Backends
from hocket.models.loader import dummy_weights
from hocket.models.registry import build_model
from hocket.overlap.slices import cut_batch, equal_bounds
from hocket.overlap.views import split_inputs

pytestmark = [  # numpy's, of the interpreter: the second two about rows of NaN, which the tests plant
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
FUSED = TritonKernels()
COUNTS = (0, 1, 3, 18)


@pytest.fixture(params=[PLAIN, FUSED], ids=["plain", "fused"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The plain ones too: what is expected is right."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def draw() -> Draw:
    return Draw(paged.CPU, torch.float32)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize("width", [1, 24, 64, 200])
def test_norms(kernels: Kernels, draw: Draw, num_rows: int, width: int) -> None:
    cases.check_norms(kernels, draw, num_rows, width)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize("width", [1, 24, 1030])
def test_silu_mul(kernels: Kernels, draw: Draw, num_rows: int, width: int) -> None:
    cases.check_silu_mul(kernels, draw, num_rows, width)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize(("rope", "num_heads", "plain"), [("pairs", 16, 128), ("yarn", 3, 16), ("odd", 18, 12)])
def test_latent_rows(kernels: Kernels, draw: Draw, num_rows: int, rope: str, num_heads: int, plain: int) -> None:
    cases.check_latent_rows(kernels, draw, num_rows, rope, num_heads, plain)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize(("rope", "num_heads", "num_keys"), [("halves", 32, 4), ("odd", 6, 3), ("yarn", 20, 20)])
def test_normed_heads(kernels: Kernels, draw: Draw, num_rows: int, rope: str, num_heads: int, num_keys: int) -> None:
    cases.check_normed_heads(kernels, draw, num_rows, rope, num_heads, num_keys)


@pytest.mark.parametrize("num_rows", [0, 1, 4])
@pytest.mark.parametrize("name", cases.ROUTINGS)
def test_route(kernels: Kernels, draw: Draw, num_rows: int, name: str) -> None:
    cases.check_route(kernels, draw, num_rows, name, width=200)


@pytest.mark.parametrize("num_rows", [1, 18, 70])
@pytest.mark.parametrize(("num_experts", "width"), [(37, 48), (64, 64), (130, 1100)])
def test_logits(draw: Draw, num_rows: int, num_experts: int, width: int) -> None:
    """In one tile and several; the width in one split and several."""
    x, weight = draw.apart(num_rows, width), draw(num_experts, width)
    cases.assert_rounded_once("logits", _logits(x, weight).sum(0), x.double() @ weight.double().T, width)


def test_of_equal_scores_the_lowest_expert_is_first(draw: Draw) -> None:
    config = cases.ROUTINGS["odd"]
    _, ids = FUSED.route(draw(3, 16), torch.zeros(config.num_experts, 16), None, config)
    assert ids.tolist() == [list(range(config.top_k))] * 3


@pytest.mark.parametrize("name", cases.MODELS)
def test_models_say_the_same(name: str) -> None:
    """Prefill, decodes and padding rows of NaN: as with the plain kernels, which are compared with transformers."""
    config = ModelConfig.from_dict(CONFIGS[name])
    runs = []
    for kernels in (PLAIN, FUSED):
        model = build_model(config, paged.one_rank_factory(config), paged.CPU, torch.float32, Backends(kernels=kernels))
        dummy_weights(model)
        runs.append(paged.PagedRun(model))
        runs[-1].spoil_padding()
    tokens = list(range(5, 20))
    for i, (first, stop) in enumerate(pairwise((0, 13, 14, 15))):
        plain, fused = (run.step([("a", tokens[first:stop])], num_padding=i)["a"] for run in runs)
        torch.testing.assert_close(fused, plain, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_latents_are_stored_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel that makes them, in every layer: prefills, decodes, padding, no tokens at all, and ubatches."""
    config = ModelConfig.from_dict(CONFIGS[name])
    with fake_flashinfer.installed():
        store = importlib.import_module("hocket.attention.store")  # what stands in; the package may have another

        stored: list[int] = []
        store_latent = fake_flashinfer.store_latent
        monkeypatch.setattr(store, "store_latent", lambda *args: (stored.append(1), store_latent(*args)))
        backends = [
            Backends(kernels=kernels, attention=FlashInferAttention(HeadShapes.of(config), paged.CPU))
            for kernels in (PLAIN, FUSED)
        ]
        runs = []
        for each in backends:
            model = build_model(config, paged.one_rank_factory(config), paged.CPU, torch.float32, each)
            dummy_weights(model)
            runs.append(paged.PagedRun(model))
        counts = []
        for run in runs:
            stored.clear()
            for num_padding, work in enumerate(([], [("a", [5, 6, 7]), ("b", [8])], [("a", [9]), ("b", [3])])):
                run.step(work, num_padding=num_padding + 1)
            inputs = run.inputs([("a", [4] * 5), ("b", [2])])
            for part in split_inputs(inputs, cut_batch([5, 1], equal_bounds(6, 2))):
                run.model(part, run.caches)
            counts.append(len(stored))
    assert counts == [5 * config.num_layers, 0]
    for plain, fused in zip(*(run.caches for run in runs), strict=True):
        assert torch.equal(plain.isnan(), fused.isnan()), "other rows were written"
        torch.testing.assert_close(fused, plain, atol=2e-5, rtol=0, equal_nan=True)
