"""Loading: nothing missing, left over, misshapen or broken passes, and every message is one line with names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make
from loading import RankFactory, Tensors, edited, failure, unset

from hocket.errors import CheckpointError
from hocket.models.loader import load_weights
from hocket.moe.placement import ExpertPlacement


def test_only_rotary_tables_and_further_token_layers_are_ignored(checkpoints: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(4)
        tensors["model.layers.4.mlp.experts.0.gate_proj.weight"] = torch.zeros(4)
        tensors["model.layers.4.shared_head.head.weight"] = torch.zeros(4)

    with_layer = edited(make("v3", checkpoints), tmp_path / "a", add, {"num_nextn_predict_layers": 1})
    load_weights(unset(with_layer), with_layer)
    unannounced = edited(make("v3", checkpoints), tmp_path / "b", add, {"num_nextn_predict_layers": 0})
    assert "3 not part of the model: model.layers.4." in failure(unannounced)


def test_missing_and_unknown_are_named_with_the_nearest(checkpoints: Path, tmp_path: Path) -> None:
    def misname(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.experts.3.down_project.weight"] = tensors.pop(
            "model.layers.1.mlp.experts.3.down_proj.weight"
        )

    text = failure(edited(make("v2", checkpoints), tmp_path / "a", misname))
    assert "1 missing: model.layers.1.mlp.experts.3.down_proj.weight" in text
    assert "(nearest name there: model.layers.1.mlp.experts.3.down_project.weight)" in text
    assert "1 not part of the model: model.layers.1.mlp.experts.3.down_project.weight" in text


def test_many_missing_are_counted(checkpoints: Path, tmp_path: Path) -> None:
    def lose(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".layers.2.mlp.experts." in n]:
            del tensors[name]

    text = failure(edited(make("v2", checkpoints), tmp_path / "a", lose))
    assert "48 missing: model.layers.2.mlp.experts.0.gate_proj.weight" in text
    assert "and 44 more" in text


@pytest.mark.parametrize(
    "extra", ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.9.norm.weight", "visual.w", "lm_head.bias"]
)
def test_left_over_tensors(extra: str, checkpoints: Path, tmp_path: Path) -> None:
    """A stacked tensor beside the single ones is left over too: each expert is expected exactly once."""
    path = edited(make("v2", checkpoints), tmp_path / "a", lambda t: t.update({extra: torch.zeros(2)}))
    assert f"1 not part of the model: {extra}" in failure(path)


@pytest.mark.parametrize("layout", ["published", "fused"])
def test_wrong_shape(layout: str, checkpoints: Path, tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        name = next(name for name in sorted(tensors) if ".mlp.experts." in name and "down_proj" in name)
        tensors[name] = tensors[name][..., :-1].contiguous()

    text = failure(edited(make("v2", checkpoints, layout), tmp_path / "a", cut))
    whole = "[16, 64, 31] instead of [16, 64, 32]" if layout == "fused" else "[64, 31] instead of [64, 32]"
    assert "1 unfit: " in text
    assert whole in text


def test_shape_of_another_ranks_expert_is_checked(checkpoints: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.15.up_proj.weight"
    path = edited(make("v2", checkpoints), tmp_path / "a", lambda t: t.update({name: torch.zeros(3, 3)}))
    model = unset(path, RankFactory(ExpertPlacement(16, 16), 0))
    with pytest.raises(CheckpointError, match=r"experts\.15\.up_proj\.weight is \[3, 3\]"):
        load_weights(model, path)


def test_broken_folders(checkpoints: Path, tmp_path: Path) -> None:
    path = make("v2", checkpoints, "sharded")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(path, tmp_path / name))

    nothing = copy("nothing")
    for file in nothing.glob("*.safetensors*"):
        file.unlink()
    assert "has no *.safetensors file" in failure(nothing)
    (nothing / "pytorch_model.bin").touch()
    assert "convert it to safetensors" in failure(nothing)

    shard_gone = copy("shard-gone")
    victim = sorted(shard_gone.glob("*.safetensors"))[1]
    victim.unlink()
    assert f"{victim.name} does not exist" in failure(shard_gone)

    cut = copy("cut")
    victim = sorted(cut.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:200])
    assert f"{victim.name} cannot be read" in failure(cut)

    index = "model.safetensors.index.json"
    for text, expected in (
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
    ):
        (cut / index).write_text(text)
        assert expected in failure(cut)

    lying = copy("lying")
    values = json.loads((lying / index).read_text())
    values["weight_map"]["model.more"] = victim.name
    (lying / index).write_text(json.dumps(values))
    assert f"names model.more, but {victim.name} does not have it" in failure(lying)

    twice = copy("twice")
    first = sorted(twice.glob("*.safetensors"))[0]
    (twice / index).unlink()
    shutil.copy(first, twice / "z.safetensors")
    assert "is in more than one file" in failure(twice)
