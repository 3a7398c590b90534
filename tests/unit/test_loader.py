"""Loading: every layout and spelling gives the same weights, and each rank reads its own experts only."""

from __future__ import annotations

import shutil
from pathlib import Path

import paged
import pytest
import torch
from checkpoints import LAYOUTS, make
from fp8_checkpoints import write
from loading import RankFactory, Tensors, edited, failure, loaded, unset
from safetensors.torch import load_file

from hocket.models import loader
from hocket.models.filling import Filler
from hocket.models.loader import LoadReport, dummy_weights, load_weights
from hocket.moe.placement import ExpertPlacement


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["v2-tied", "v3-yarn", "qwen3-yarn"])
def test_layouts_give_equal_weights(name: str, layout: str, checkpoints: Path) -> None:
    path = make(name, checkpoints, layout)
    expected = loaded(make(name, checkpoints))
    model = loaded(path)
    assert model.config == expected.config
    for key, value in model.named_parameters():
        assert torch.equal(value, expected.get_parameter(key)), key
        assert not value.isnan().any(), key


@pytest.mark.parametrize("layout", ["published", "fused-sharded"])
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_each_rank_reads_its_own_experts(strategy: str, layout: str, checkpoints: Path) -> None:
    path = make("v2", checkpoints, layout)
    whole = unset(path)
    everything = load_weights(whole, path)
    placement = ExpertPlacement(whole.config.moe.num_experts, 3, strategy)
    experts_read = 0
    for rank in range(3):
        model = unset(path, RankFactory(placement, rank))
        mine = list(placement.experts_of(rank))
        report = load_weights(model, path)
        experts_read += everything.bytes_read - report.bytes_read
        assert report.num_tensors < everything.num_tensors
        for key, value in model.named_parameters():
            full = whole.get_parameter(key)
            assert torch.equal(value, full[mine] if ".experts." in key else full), key
    per_expert = 3 * 32 * 64 * 4
    assert experts_read == 2 * 16 * 3 * per_expert, "every expert of 3 layers is left out by 2 of 3 ranks"


class ThreadedFiller(Filler):
    """With as many threads as a GPU's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_threads = 3


@pytest.mark.parametrize("is_inference", [False, True])
def test_threads_fill_tensors_of_either_mode(
    is_inference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors made in inference mode, as engines make them, can be changed in that mode alone; the mode is a thread's.

    In the checkpoint: fp8 that is expanded, fp32 that is converted.
    """
    path = write(tmp_path / "a")
    expected = loaded(path, dtype=torch.bfloat16)
    monkeypatch.setattr(loader, "Filler", ThreadedFiller)
    with torch.inference_mode(is_inference):
        model = loaded(path, dtype=torch.bfloat16)
    for key, value in model.named_parameters():
        assert value.is_inference() is is_inference, key
        assert torch.equal(value, expected.get_parameter(key)), key


def test_report_and_progress(checkpoints: Path) -> None:
    path = make("v2", checkpoints)
    model = unset(path)
    seen: list[tuple[int, int]] = []
    report = load_weights(model, path, on_progress=lambda done, total: seen.append((done, total)))
    assert isinstance(report, LoadReport)
    assert report.bytes_read == sum(value.nbytes for value in model.parameters())
    assert seen[-1] == (report.bytes_read, report.bytes_read)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) <= 101
    assert report.seconds > 0


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "thinker.model.", ""])
def test_nested_names(prefix: str, checkpoints: Path, tmp_path: Path) -> None:
    base = make("v3", checkpoints)

    def nest(tensors: Tensors) -> None:
        for name in list(tensors):
            value = tensors.pop(name)
            if name.startswith("model."):
                tensors[prefix + name.removeprefix("model.")] = value
            else:
                tensors[("language_model." if prefix.startswith("language") else "") + name] = value

    path = edited(base, tmp_path / "nested", nest)
    expected = loaded(base)
    for key, value in loaded(path).named_parameters():
        assert torch.equal(value, expected.get_parameter(key)), key
    broken = edited(path, tmp_path / "broken", lambda t: t.pop(f"{prefix}layers.2.self_attn.o_proj.weight"))
    assert f"1 missing: {prefix}layers.2.self_attn.o_proj.weight" in failure(broken)


def test_shards_without_an_index(checkpoints: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(make("v2", checkpoints, "sharded"), tmp_path / "a"))
    (path / "model.safetensors.index.json").unlink()
    load_weights(unset(path), path)


def test_dtypes(checkpoints: Path, tmp_path: Path) -> None:
    def to_int(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)

    assert "model.norm.weight has dtype I32" in failure(edited(make("v2", checkpoints), tmp_path / "a", to_int))
    model = loaded(make("v3", checkpoints, dtype=torch.bfloat16), dtype=torch.bfloat16)
    routers = [v for k, v in model.named_parameters() if ".router." in k]
    assert {v.dtype for v in routers} == {torch.float32}
    assert model.embed_tokens.dtype == torch.bfloat16


def test_tied_embeddings(checkpoints: Path, tmp_path: Path) -> None:
    base = make("v2-tied", checkpoints)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    same = edited(base, tmp_path / "a", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    model = loaded(same)
    assert model.lm_head is model.embed_tokens
    other = edited(base, tmp_path / "b", lambda t: t.update({"lm_head.weight": embedding + 1}))
    assert "lm_head.weight differs from model.embed_tokens.weight" in failure(other)
    untied = edited(base, tmp_path / "c", lambda t: None, {"tie_word_embeddings": False})
    assert "1 missing: lm_head.weight" in failure(untied)


def test_dummy_weights_depend_on_names_alone(checkpoints: Path) -> None:
    path = make("v3", checkpoints)
    whole, again, other = unset(path), unset(path), unset(path)
    report = dummy_weights(whole, 3)
    dummy_weights(again, 3)
    dummy_weights(other, 4)
    assert report.bytes_read == 0
    for key, value in whole.named_parameters():
        assert value.isfinite().all(), key
        assert torch.equal(value, again.get_parameter(key))
        assert "norm" in key or not torch.equal(value, other.get_parameter(key)), key
    part = unset(path, RankFactory(ExpertPlacement(16, 2, "round_robin"), 1))
    dummy_weights(part, 3)
    mine, full = part.layers[1].mlp.experts.w13, whole.layers[1].mlp.experts.w13  # type: ignore[union-attr]
    assert torch.equal(mine[:8], full[1::2])  # type: ignore[index]
    logits = paged.PagedRun(whole).step([("a", [5, 6, 7])])["a"]
    assert logits.isfinite().all()
    assert 0.1 < float(logits.std()) < 10
