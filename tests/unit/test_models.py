"""Models against transformers in fp32: whole prompts, and any mix of chunks, decodes and padding over a paged cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import paged
import pytest
import torch
from checkpoints import CONFIGS, hf_reference, make
from torch import Tensor

from hocket.cache.storage import allocate_kv_caches, bytes_per_block
from hocket.config.model import ModelConfig
from hocket.errors import ConfigError
from hocket.layers.rotary import RotaryEmbedding
from hocket.models.base import CausalLM
from hocket.models.registry import build_model, model_class

TOLERANCE = 1e-5
LENGTHS = [37, 5, 1, 60]
NUM_NEW = 3


def prompts_of(path: Path) -> list[list[int]]:
    return hf_reference(path).prompts(LENGTHS, NUM_NEW)


def worst(mine: Tensor, path: Path, tokens: list[int], first: int = 0) -> float:
    """Largest distance of logits from transformers'; `mine` are those of tokens[first], tokens[first + 1], …"""
    return float((mine - hf_reference(path).logits(tokens)[first : first + len(mine)]).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_prompts_and_greedy_tokens(name: str, checkpoints: Path) -> None:
    path = make(name, checkpoints)
    prompts = prompts_of(path)
    model = paged.load(path)
    named = {str(i): prompt for i, prompt in enumerate(prompts)}
    logits = paged.PagedRun(model).step(list(named.items()))
    assert max(worst(logits[key], path, prompt) for key, prompt in named.items()) < TOLERANCE
    tokens = paged.PagedRun(model, block_size=7, seed=1).greedy(named, NUM_NEW)
    assert tokens == {key: hf_reference(path).greedy(prompt, NUM_NEW) for key, prompt in named.items()}


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("v2", 16),
        ("v2-yarn", 5),
        ("v2-groups", 3),
        ("v2-tied", 4),
        ("v3-yarn", 16),
        ("v3-halves", 1),
        ("qwen3", 16),
        ("qwen3-yarn", 7),
        ("qwen3-no-norm", 16),
    ],
)
def test_mixed_steps(name: str, block_size: int, checkpoints: Path) -> None:
    """Chunks, decodes and fresh prompts in one step, decodes neither first nor together, padding rows of NaN."""
    path = make(name, checkpoints)
    a, b, c, d = (ids * 2 for ids in prompts_of(path))
    run = paged.PagedRun(paged.load(path), block_size=block_size, num_blocks=400 // block_size + 8, seed=block_size)
    run.spoil_padding()
    steps = [
        [("a", a[:11]), ("b", b[:1])],
        [("b", b[1:2]), ("a", a[11:30]), ("c", c[:1]), ("d", d[:100])],
        [("d", d[100:101]), ("a", a[30:31]), ("b", b[2:7]), ("c", c[1:2])],
        [("a", a[31:32]), ("b", b[7:8]), ("d", d[101:102])],
    ]
    whole = {"a": a, "b": b, "c": c, "d": d}
    done = dict.fromkeys(whole, 0)
    for i, work in enumerate(steps):
        logits = run.step(work, num_padding=i)
        for name_, new in work:
            assert worst(logits[name_], path, whole[name_], done[name_]) < TOLERANCE, (i, name_)
            done[name_] += len(new)


@pytest.mark.parametrize("name", ["v3-yarn", "qwen3"])
def test_a_step_without_tokens(name: str, checkpoints: Path) -> None:
    model = paged.load(make(name, checkpoints))
    assert paged.PagedRun(model).step([]) == {}
    run = paged.PagedRun(model)
    inputs = run.inputs([], num_padding=3)
    assert model(inputs, run.caches).shape == (3, 64)
    assert all(bool(cache.isnan().all()) for cache in run.caches)


@pytest.mark.parametrize("name", ["v2-groups", "v3", "qwen3"])
def test_bf16_is_near_fp32(name: str, checkpoints: Path) -> None:
    """No farther from fp32 logits than twice what transformers is in bf16."""
    path = make(name, checkpoints)
    tokens = prompts_of(path)[3]
    exact = hf_reference(path).logits(tokens)
    mine = paged.PagedRun(paged.load(path, torch.bfloat16)).step([("a", tokens)])["a"]

    from transformers import AutoModelForCausalLM

    theirs_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0].float()
    assert (mine - exact).abs().mean() < 2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("experts_backend", ["reference", "grouped_mm"])
def test_experts_backends_agree(experts_backend: str, checkpoints: Path) -> None:
    path = make("v3", checkpoints)
    tokens = prompts_of(path)[0]
    model = paged.load(path, experts_backend=experts_backend)
    assert worst(paged.PagedRun(model).step([("a", tokens)])["a"], path, tokens) < TOLERANCE


@pytest.mark.parametrize("name", ["v2", "qwen3"])
def test_cache_sizes(name: str, checkpoints: Path) -> None:
    config = ModelConfig.from_pretrained(make(name, checkpoints))
    caches = allocate_kv_caches(config, 3, 5, torch.bfloat16, paged.CPU)
    assert len(caches) == config.num_layers
    assert sum(cache.nbytes for cache in caches) == 3 * bytes_per_block(config, torch.bfloat16, 5)
    assert caches[0].shape == ((3, 5, 40) if name == "v2" else (2, 3, 5, 2, 20))


def test_no_parameter_is_trained(checkpoints: Path) -> None:
    model = paged.load(make("v3", checkpoints))
    assert not any(value.requires_grad for value in model.parameters())
    assert not paged.PagedRun(model).step([("a", [5, 6])])["a"].requires_grad


def test_rotary_tables_grow() -> None:
    config = ModelConfig.from_dict(CONFIGS["v2-yarn"])
    rotary = RotaryEmbedding(config.rope, paged.CPU)
    x = torch.randn(2, 3, config.rope.dim)
    small = rotary(torch.tensor([3, 9]), 9).rotate(x)
    rotary(torch.tensor([9000]), 9000)
    assert torch.equal(rotary(torch.tensor([3, 9]), 9).rotate(x), small)
    with pytest.raises(IndexError):
        rotary(torch.tensor([1 << 20]), 10)


def test_unknown_model_type() -> None:
    with pytest.raises(ConfigError, match="deepseek_v3"):
        model_class("llama")


def test_rotary_width_must_fit(checkpoints: Path) -> None:
    config = ModelConfig.from_pretrained(make("qwen3", checkpoints))
    wrong = dataclasses.replace(config, rope=dataclasses.replace(config.rope, dim=10))
    with pytest.raises(ConfigError, match="head_dim"):
        build_model(wrong, paged.one_rank_factory(wrong), paged.CPU, torch.float32)


def test_models_are_causal_lms() -> None:
    assert issubclass(model_class("qwen3_moe"), CausalLM)
