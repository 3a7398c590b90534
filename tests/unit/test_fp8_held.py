"""Checkpoints in fp8 on a machine where fp8 runs (here: told so): held as they are, merged, spread, refused, drawn."""

from __future__ import annotations

import logging
from pathlib import Path

import paged
import pytest
import torch
from fp8_checkpoints import WIDE, Tensors, write
from loading import RankFactory, failure, loaded, unset
from torch import Tensor, nn

from hocket.config.model import ModelConfig
from hocket.layers.linear import Fp8Linear, Linear
from hocket.models.backends import backends_for
from hocket.models.base import CausalLM
from hocket.models.loader import dummy_weights, load_weights
from hocket.models.registry import build_model
from hocket.moe.experts.base import Experts
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.placement import ExpertPlacement
from hocket.quant import fp8


@pytest.fixture
def fp8_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "unsupported_reason", lambda *_: None)


def held(path: Path) -> CausalLM:
    """The model as loaded, with the backend that runs in fp8."""
    config = ModelConfig.from_pretrained(path)
    model = build_model(config, paged.one_rank_factory(config, "auto"), paged.CPU, torch.float32)
    load_weights(model, path)
    return model


def kinds(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, Linear | Experts)}


def assert_same_weights(model: CausalLM, expanded: CausalLM) -> None:
    """What is held in fp8 expands to what was expanded at once."""
    others = dict(expanded.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            assert torch.equal(fp8.expand_blocks(module.weight, module.scale), others[name].weight), name
        elif isinstance(module, Fp8Experts):
            for key in ("w13", "w2"):
                pairs = zip(getattr(module, key), getattr(module, f"{key}_scale"), strict=True)
                found = torch.stack([fp8.expand_blocks(*pair) for pair in pairs])
                assert torch.equal(found, getattr(others[name], key)), name
        else:
            for key, value in module.named_parameters(recurse=False):
                assert torch.equal(value, getattr(others[name], key)), (name, key)


def logits(model: CausalLM) -> Tensor:
    prompt = torch.randint(3, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    return paged.PagedRun(model).step([("a", prompt)])["a"]


def test_held_and_merged(tmp_path: Path, fp8_runs: None, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        model = held(path)
    assert not caplog.records
    found = kinds(model)
    assert found.pop("layers.0.attention.kv_b") is Linear
    assert found.pop("layers.1.attention.kv_b") is Linear
    assert found.pop("layers.1.mlp.experts") is Fp8Experts
    assert set(found.values()) == {Fp8Linear}
    assert {name.rpartition(".")[2] for name in found} == {"qkv_a", "q_b", "o", "gate_up", "down"}


def test_answers_are_near_the_expanded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        expanded = loaded(path)
    assert "fp8 tensors are expanded to torch.float32: fp8 kernels need an NVIDIA GPU" in caplog.text
    assert not any(issubclass(kind, Fp8Linear | Fp8Experts) for kind in kinds(expanded).values())
    monkeypatch.setattr(fp8, "unsupported_reason", lambda *_: None)
    model = held(path)
    assert_same_weights(model, expanded)
    found, expected = logits(model), logits(expanded)
    error = (found - expected).norm() / expected.norm()
    # Two layers of five roundings of 2^-4 / sqrt(3) at most each, independent: sqrt(10) of that.
    assert 0 < error < 10**0.5 * 2.0**-4 / 3**0.5


def test_pieces_that_do_not_begin_at_a_block_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """qkv_a: q_a_proj of 120 rows before kv_a; down of a dense layer: 200 columns; qkv of widths that fit is held."""
    path = write(tmp_path / "a", {**WIDE, "q_lora_rank": 120, "intermediate_size": 200})
    expanded = loaded(path)
    monkeypatch.setattr(fp8, "unsupported_reason", lambda *_: None)
    model = held(path)
    found = kinds(model)
    assert found["layers.1.attention.qkv_a"] is Linear
    assert found["layers.0.attention.q_b"] is Linear
    assert found["layers.0.mlp.gate_up"] is Linear
    assert found["layers.0.mlp.down"] is Linear
    assert found["layers.1.mlp.shared_experts.down"] is Fp8Linear
    assert_same_weights(model, expanded)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_were_not_converted(key: str, tmp_path: Path, fp8_runs: None) -> None:
    names = ["lm_head", "model.layers.0.self_attn.o_proj", "shared_experts", "model.language_model.layers.0.mlp"]

    def expand(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            if "layers.0.self_attn.o_proj." in name or "shared_experts" in name or "layers.0.mlp." in name:
                weight = name.removesuffix("_scale_inv")
                tensors[weight] = fp8.expand_blocks(tensors[weight], tensors.pop(name))

    path = write(tmp_path / "a", edit=expand, quantization={key: names})
    found = kinds(held(path))
    assert found["layers.0.attention.o"] is Linear
    assert found["layers.1.attention.o"] is Fp8Linear
    assert found["layers.0.mlp.gate_up"] is Linear
    assert found["layers.1.mlp.shared_experts.down"] is Linear
    assert found["layers.1.mlp.experts"] is Fp8Experts


def test_what_does_not_fit_is_named(tmp_path: Path, fp8_runs: None) -> None:
    weight = "model.layers.1.self_attn.o_proj.weight"
    scale = f"{weight}_scale_inv"
    changes = {
        f"{weight} has dtype F8_E4M3 and no scale": lambda t: t.pop(scale),
        f"{scale} is [1, 1] instead of [2, 1]": lambda t: t.update({scale: t[scale][:1, :1].contiguous()}),
        f"{scale} has dtype I32": lambda t: t.update({scale: t[scale].int()}),
        "1 not part of the model: a.weight_scale_inv": lambda t: t.update({"a.weight_scale_inv": torch.ones(1, 1)}),
        f"{weight} has dtype F32 instead of F8_E4M3": lambda t: t.update(
            {weight: t[weight].float(), "x": t.pop(scale)}
        ),
    }
    for i, (message, change) in enumerate(changes.items()):
        assert message in failure(write(tmp_path / str(i), edit=change)), message


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_rank_reads_its_own_experts(is_stacked: bool, tmp_path: Path, fp8_runs: None) -> None:
    def stack(tensors: Tensors) -> None:
        if not is_stacked:
            return
        prefix = "model.layers.1.mlp.experts"
        for end in ("", "_scale_inv"):
            parts = {
                kind: torch.stack([tensors.pop(f"{prefix}.{i}.{kind}.weight{end}") for i in range(8)])
                for kind in ("gate_proj", "up_proj", "down_proj")
            }
            tensors[f"{prefix}.down_proj{end}"] = parts["down_proj"]
            tensors[f"{prefix}.gate_up_proj{end}"] = torch.cat((parts["gate_proj"], parts["up_proj"]), 1)

    path = write(tmp_path / "a", edit=stack)
    whole = held(path)
    everything = load_weights(whole, path).bytes_read
    placement = ExpertPlacement(8, 2, "round_robin")
    for rank in range(2):
        factory = RankFactory(placement, rank)
        factory._experts_backend = "auto"
        model = unset(path, factory)
        report = load_weights(model, path)
        mine, full = model.layers[1].mlp.experts, whole.layers[1].mlp.experts  # type: ignore[union-attr]
        for key in ("w13", "w13_scale", "w2", "w2_scale"):
            assert torch.equal(getattr(mine, key), getattr(full, key)[rank::2]), key
        per_expert = 3 * 128 * 256 + 3 * 2 * 4
        assert everything - report.bytes_read == 4 * per_expert


def test_what_else_expands(tmp_path: Path, fp8_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another experts backend, batch invariance, and being told so."""
    path = write(tmp_path / "a")
    config = ModelConfig.from_pretrained(path)
    model = build_model(config, paged.one_rank_factory(config, "reference"), paged.CPU, torch.float32)
    assert kinds(model)["layers.1.mlp.experts"].__name__ == "ReferenceExperts"
    assert kinds(model)["layers.1.attention.o"] is Fp8Linear
    factory = paged.one_rank_factory(config, "tiled")
    model = build_model(config, factory, paged.CPU, torch.float32, backends_for("tiled", True))
    assert kinds(model)["layers.1.attention.o"] is Linear
    monkeypatch.setenv("HOCKET_FP8", "0")
    assert kinds(held(path))["layers.1.attention.o"] is Linear


def test_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a")
    expanded = unset(path)
    dummy_weights(expanded, 3)
    monkeypatch.setattr(fp8, "unsupported_reason", lambda *_: None)
    config = ModelConfig.from_pretrained(path)
    model = build_model(config, paged.one_rank_factory(config, "auto"), paged.CPU, torch.float32)
    dummy_weights(model, 3)
    layer, other = model.layers[1].mlp.experts, expanded.layers[1].mlp.experts  # type: ignore[union-attr]
    found = fp8.expand_blocks(layer.w13[5], layer.w13_scale[5])  # type: ignore[union-attr, index]
    assert 0 < (found - other.w13[5]).norm() / other.w13[5].norm() < 2.0**-4  # type: ignore[union-attr, index]
    assert logits(model).isfinite().all()
