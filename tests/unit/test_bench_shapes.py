"""Shapes for benchmarks: slices of larger deployments, fewer layers, and the published ones that are committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.bench.shapes import changed, published_name, sliced, token_bytes
from hocket.config.model import ModelConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import ConfigError

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHAPES / name / "config.json").read_text())
    return found


def options(name: str = "deepseek-v3", **given: Any) -> Options:
    return Options(model=str(SHAPES / name), **{"load_format": "dummy", "device": "cpu", **given})


@pytest.mark.parametrize(
    ("name", "of_ep", "num_ranks", "experts", "groups"),
    [
        ("deepseek-v3", 32, 2, 16, (8, 4)),  # groups of two, four of them: exactly the eight experts of a token
        ("deepseek-v3", 32, 1, 8, (1, 1)),  # four groups of one would not hold eight experts
        ("deepseek-v3", 16, 4, 64, (8, 4)),
        ("deepseek-v3", 2, 2, 256, (8, 4)),
        ("qwen3-30b-a3b", 16, 2, 16, (1, 1)),
        ("deepseek-v2-lite", 16, 2, 8, (1, 1)),
    ],
)
def test_a_slice_keeps_experts_per_rank_and_rows_per_expert(
    name: str, of_ep: int, num_ranks: int, experts: int, groups: tuple[int, int]
) -> None:
    whole = ModelConfig.from_dict(published(name)).moe
    changes, found = sliced(published(name), of_ep, num_ranks)
    moe = ModelConfig.from_dict(changes).moe
    assert (moe.num_experts, moe.num_groups, moe.topk_groups) == (experts, *groups)
    assert moe.top_k == whole.top_k
    assert moe.num_experts / num_ranks == whole.num_experts / of_ep == found.experts_per_rank
    tokens = 100
    rows_there = of_ep * tokens * whole.top_k / whole.num_experts
    rows_here = num_ranks * tokens * moe.top_k / moe.num_experts
    assert rows_here == rows_there == tokens * found.rows_per_expert_and_token


@pytest.mark.parametrize(
    ("of_ep", "num_ranks"),
    [(24, 2), (1, 2), (128, 2), (512, 2)],  # no divisor; fewer than ranks; 4 experts for a token's 8; over all experts
)
def test_impossible_slices_are_refused(of_ep: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"slice_of_ep: {of_ep}"):
        sliced(published("deepseek-v3"), of_ep, num_ranks)


def test_nested_configurations_are_sliced_inside() -> None:
    outer = {"model_type": "some_multi_modal", "text_config": published("qwen3-30b-a3b")}
    changes, _ = sliced(outer, 16, 2)
    assert ModelConfig.from_dict(changes).moe.num_experts == 16
    assert "num_experts" not in changes


def test_an_engine_of_the_changed_shape() -> None:
    given = options(data_parallel_size=2, enable_expert_parallel=True)
    with changed(given, 32, 5) as (shaped, found):
        config = resolve(shaped)
        folder = Path(shaped.model)
        assert folder.is_dir()
    assert not folder.exists()
    assert found is not None
    assert (config.model.num_layers, config.model.moe.num_experts) == (5, 16)
    assert config.model.moe.layers == (False, False, False, True, True)
    assert config.model.hidden_size == resolve(given).model.hidden_size


def test_dense_layers_may_be_left_out() -> None:
    with changed(options(), 32, 5, 0) as (shaped, _):
        assert all(resolve(shaped).model.moe.layers)
    for name, loading, field in (("qwen3-30b-a3b", "dummy", "first_k_dense"), ("deepseek-v3", "auto", "num_dense")):
        with pytest.raises(ConfigError, match=field), changed(options(name, load_format=loading), None, None, 0):
            pass


def test_bytes_of_a_token_between_the_gpus_of_a_large_deployment() -> None:
    """DeepSeek-V3 on two ranks: four copies of 7168 elements leave, in a byte each and 56 scales of four, or in two."""
    model = ModelConfig.from_dict(published("deepseek-v3"))
    assert token_bytes(model, 2, "bfloat16", is_fp8=True) == (4 * (7168 + 56 * 4), 4 * 7168 * 2)
    assert token_bytes(model, 2, "bfloat16", is_fp8=False) == (4 * 7168 * 2, 4 * 7168 * 2)
    assert token_bytes(model, 4, "bfloat16", is_fp8=False) == (6 * 7168 * 2, 6 * 7168 * 2)


def test_a_slice_is_called_as_its_model_is() -> None:
    names = ("deepseek-v3", "deepseek-v3-fp8", "qwen3-30b-a3b")
    found = [published_name(ModelConfig.from_dict(published(name)), f"some/{name}") for name in names]
    assert found == ["DeepSeek-V3", "DeepSeek-V3", "qwen3-30b-a3b"]


def test_without_changes_options_stay_what_they_are() -> None:
    given = options(load_format="auto")
    with changed(given, None, None) as (shaped, found):
        assert (shaped, found) == (given, None)


@pytest.mark.parametrize(("changes", "field"), [((32, None), "slice_of_ep"), ((None, 3), "num_layers")])
def test_shapes_change_only_with_dummy_weights(changes: tuple[int | None, int | None], field: str) -> None:
    with pytest.raises(ConfigError, match=field), changed(options(load_format="auto"), *changes):
        pass


def test_sizes_of_the_committed_shapes() -> None:
    """Parameters as the models' publishers state them: 15.7, 671 and 30.5 billion."""
    assert billions("deepseek-v2-lite") == pytest.approx(15.7, abs=0.05)
    assert billions("deepseek-v3") == pytest.approx(671, abs=0.5)
    assert billions("qwen3-30b-a3b") == pytest.approx(30.5, abs=0.05)
    fp8 = published("deepseek-v3-fp8")
    assert fp8.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert fp8 == published("deepseek-v3")


def billions(name: str) -> float:
    """Parameters of matrices, by the names in config.json and nothing of ours."""
    hf = published(name)
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    if "kv_lora_rank" in hf:
        query = heads * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        rank = hf["q_lora_rank"]
        attention = hidden * query if rank is None else rank * (hidden + query)
        attention += hidden * (hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
        attention += hf["kv_lora_rank"] * heads * (hf["qk_nope_head_dim"] + hf["v_head_dim"])
        attention += heads * hf["v_head_dim"] * hidden
        dense, experts = hf["first_k_dense_replace"], hf["n_routed_experts"] + hf["n_shared_experts"]
        routed = hf["n_routed_experts"]
    else:
        attention = hidden * hf["head_dim"] * 2 * (heads + hf["num_key_value_heads"])
        dense, experts, routed = 0, hf["num_experts"], hf["num_experts"]
    sparse = experts * 3 * hidden * hf["moe_intermediate_size"] + hidden * routed
    total = layers * attention + dense * 3 * hidden * hf["intermediate_size"] + (layers - dense) * sparse
    return float(total + 2 * hf["vocab_size"] * hidden) / 1e9
