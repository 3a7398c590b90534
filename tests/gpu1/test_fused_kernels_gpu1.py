"""Fused kernels on a GPU in all dtypes, over the sizes of published models; under capture; and models made of them."""

from __future__ import annotations

from pathlib import Path

import fused_cases as cases
import paged
import pytest
import torch
from checkpoints import hf_reference, make
from fused_cases import Draw

from hocket.layers.kernels import PLAIN
from hocket.layers.triton_kernels import TritonKernels
from hocket.models.backends import backends_for, fastest_kernels

CUDA = torch.device("cuda")
FUSED = TritonKernels()
COUNTS = (0, 1, 3, 64, 513)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-4


@pytest.fixture(params=DTYPES, ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(CUDA, request.param)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize("width", [1, 24, 200, 1536, 2048, 7168])
def test_norms(draw: Draw, num_rows: int, width: int) -> None:
    cases.check_norms(FUSED, draw, num_rows, width)


@pytest.mark.parametrize("num_rows", COUNTS)
def test_logits_are_not_rounded(draw: Draw, num_rows: int) -> None:
    x, weight = draw(num_rows, 256), draw(4000, 256)
    logits = FUSED.logits(x, weight)
    assert logits.dtype == torch.float32
    cases.assert_rounded_once("logits", logits, x.double() @ weight.double().T, 256)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize("width", [1, 24, 1030, 2816, 10944])
def test_silu_mul(draw: Draw, num_rows: int, width: int) -> None:
    cases.check_silu_mul(FUSED, draw, num_rows, width)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize(
    ("rope", "num_heads", "plain"), [("pairs", 16, 128), ("pairs", 128, 128), ("yarn", 3, 16), ("odd", 18, 12)]
)
def test_latent_rows(draw: Draw, num_rows: int, rope: str, num_heads: int, plain: int) -> None:
    cases.check_latent_rows(FUSED, draw, num_rows, rope, num_heads, plain)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize(("rope", "num_heads", "num_keys"), [("halves", 32, 4), ("odd", 6, 3), ("yarn", 20, 20)])
def test_normed_heads(draw: Draw, num_rows: int, rope: str, num_heads: int, num_keys: int) -> None:
    cases.check_normed_heads(FUSED, draw, num_rows, rope, num_heads, num_keys)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize(("name", "width"), [*((name, 200) for name in cases.ROUTINGS), ("v2", 2048), ("v3", 7168)])
def test_route(draw: Draw, num_rows: int, name: str, width: int) -> None:
    cases.check_route(FUSED, draw, num_rows, name, width)


@pytest.mark.parametrize("num_rows", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_route_by_a_gate_of_few_bits(num_rows: int, dtype: torch.dtype) -> None:
    cases.check_route(FUSED, Draw(CUDA, dtype), num_rows, "qwen3", 2048, weight_dtype=dtype)


def test_graphs_follow_their_inputs() -> None:
    """Captured once, replayed on other values: nothing of the first is left."""
    draw, config = Draw(CUDA, torch.bfloat16), cases.ROUTINGS["v3"]
    x, residual, padding = draw(64, 512), draw(64, 512), torch.zeros(64, dtype=torch.bool, device=CUDA)
    gain, gate, bias = draw(512), draw(256, 512, dtype=torch.float32), draw(256, dtype=torch.float32)

    def run() -> tuple[torch.Tensor, ...]:
        normed, total = FUSED.add_rms_norm(x, residual.clone(), gain, cases.EPS)
        return total, FUSED.silu_mul(normed), *FUSED.route(normed, gate, bias, config, padding)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        x.copy_(draw(64, 512))
        padding.fill_(False)[seed : 20 * seed] = True
        graph.replay()
        for got, expected in zip(captured, run(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", cases.MODELS)
def test_models_say_what_transformers_say(name: str, tmp_path: Path) -> None:
    """In fp32: a prompt and one decode, with padding rows of NaN; and it is the fused kernels that ran."""
    path = make(name, tmp_path)
    tokens = hf_reference(path).prompts([40], 0)[0]
    backends = backends_for("sdpa", False, device=CUDA)
    assert isinstance(backends.kernels, TritonKernels)
    run = paged.PagedRun(paged.load(path, device=CUDA, backends=backends))
    run.spoil_padding()
    logits = [run.step([("a", part)], num_padding=2)["a"].cpu() for part in (tokens[:-1], tokens[-1:])]
    error = float((torch.cat(logits) - hf_reference(path).logits(tokens)).abs().max())
    assert error < TOLERANCE, f"logits of {name} are {error:.3g} from transformers'"


def test_the_environment_may_ask_for_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_KERNELS", "torch")
    assert fastest_kernels(CUDA) is PLAIN
