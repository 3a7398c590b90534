"""config.json: wrong values are named in one line, absent ones have transformers' defaults."""

from __future__ import annotations

from typing import Any

import pytest
from configs import QWEN

from hocket.config.model import ModelConfig
from hocket.errors import ConfigError

NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok"),
    *("max_position_embeddings", "rope_theta"),
)


@pytest.mark.parametrize("wrong", [None, "x", [], {}, -1, 0, True, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("key", NUMBERS)
def test_a_value_that_makes_no_sense_is_named_in_one_line(key: str, wrong: Any) -> None:
    if wrong is None and key in ("num_key_value_heads", "head_dim", "rope_theta"):
        ModelConfig.from_dict(QWEN | {key: wrong})  # null: not given
        return
    with pytest.raises(ConfigError, match=key) as caught:
        ModelConfig.from_dict(QWEN | {key: wrong})
    assert "\n" not in str(caught.value)


V3 = {key: value for key, value in QWEN.items() if key not in ("num_experts", "head_dim", "num_key_value_heads")} | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


@pytest.mark.parametrize(
    ("base", "change", "key"),
    [
        (QWEN, {"rope_scaling": "yarn"}, "rope_scaling"),
        (QWEN, {"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor"),
        (QWEN, {"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor"),
        (QWEN, {"rope_scaling": {"rope_type": 4}}, "rope_type"),
        (QWEN, {"partial_rotary_factor": 2}, "rotated"),
        (QWEN, {"head_dim": 15}, "rotated"),
        (QWEN, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (QWEN, {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (QWEN, {"eos_token_id": "x"}, "eos_token_id"),
        (QWEN, {"eos_token_id": [-1]}, "eos_token_id"),
        (QWEN, {"torch_dtype": 16}, "torch_dtype"),
        (QWEN, {"rms_norm_eps": "small"}, "rms_norm_eps"),
        (QWEN, {"hidden_act": 3}, "hidden_act"),
        (QWEN, {"quantization_config": "fp8"}, "quantization_config"),
        (QWEN, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8]}}, "weight_block_size"),
        (QWEN, {"quantization_config": {"quant_method": "fp8", "weight_block_size": ["a", 0]}}, "weight_block_size"),
        (V3, {"q_lora_rank": -1}, "q_lora_rank"),
        (V3, {"kv_lora_rank": None}, "kv_lora_rank"),
        (V3, {"n_group": -8}, "n_group"),
        (V3, {"n_group": 3}, "n_group"),
        (V3, {"topk_group": 9}, "topk_group"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        (V3, {"n_shared_experts": "one"}, "n_shared_experts"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (V3, {"moe_layer_freq": 0}, "moe_layer_freq"),
        (V3, {"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
    ],
)
def test_other_values_that_make_no_sense(base: dict[str, Any], change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        ModelConfig.from_dict(base | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_absent_keys_have_transformers_defaults(model_type: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type)
    given = (QWEN if model_type == "qwen3_moe" else V3) | {"model_type": model_type}
    given = {key: value for key, value in given.items() if key != "q_lora_rank"}
    ours = ModelConfig.from_dict(given)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.attention_bias is theirs.attention_bias
    assert ours.moe.norm_topk_prob is theirs.norm_topk_prob
    if ours.mla is None:
        assert ours.moe.layers == (True,) * 4
        return
    assert ours.mla.q_lora_rank == theirs.q_lora_rank
    assert ours.moe.num_shared_experts == theirs.n_shared_experts
    assert ours.moe.num_groups == (theirs.n_group or 1)
    assert ours.moe.topk_groups == (theirs.topk_group or 1)
    assert ours.moe.routed_scaling_factor == theirs.routed_scaling_factor
    assert ours.moe.layers == tuple(i >= theirs.first_k_dense_replace for i in range(4))


def test_null_switches_off() -> None:
    off = ModelConfig.from_dict(V3 | {"n_group": None, "topk_group": None, "n_shared_experts": None})
    assert (off.moe.num_groups, off.moe.topk_groups, off.moe.num_shared_experts) == (1, 1, 0)
    assert off.mla is not None
    assert off.mla.q_lora_rank is None
