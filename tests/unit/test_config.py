"""Options: every wrong value ends in one line with field, value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import QWEN

from hocket.config.model import ModelConfig
from hocket.config.options import Options, read_yaml
from hocket.config.resolve import model_folder, resolve
from hocket.errors import BackendUnavailable, CheckpointError, ConfigError

WIDE = {"data_parallel_size": 2, "enable_expert_parallel": True}
LINK = WIDE | {"emulate_link_gb_per_s": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        ({"block_size": 0}, "block_size", "from 1 to 1024"),
        ({"block_size": "16"}, "block_size", "a whole number"),
        ({"dtype": "int8"}, "dtype", "auto, float32, bfloat16, float16"),
        ({"enable_expert_parallel": 1}, "enable_expert_parallel", "true or false"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", "from 0.01 to 1.0"),
        ({"all2all_backend": "deepep"}, "all2all_backend", "auto, torch, allgather_reducescatter"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "data_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "data_parallel_size"),
        ({"max_model_len": 1024}, "max_model_len", "at most 512"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 32}, "max_num_batched_tokens", "at least max_num_seqs (32)"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
            "max_num_batched_tokens",
            "at least max_model_len (512)",
        ),
        ({"all2all_backend": "torch"}, "all2all_backend", "data_parallel_size"),
        ({"data_parallel_sise": 2}, "data_parallel_sise", "data_parallel_size"),
        ({"load_format": "gguf"}, "load_format", "auto, dummy"),
        ({"seed": -1}, "seed", "from 0 to"),
        ({"enable_dbo": True}, "enable_dbo", "data_parallel_size"),
        ({"ubatch_size": 3, "enable_expert_parallel": True}, "ubatch_size", "data_parallel_size"),
        (WIDE | {"enable_dbo": True, "ubatch_size": 3}, "ubatch_size", "0 or 2"),
        (WIDE | {"enable_dbo": True, "dbo_decode_token_threshold": 1}, "dbo_decode_token_threshold", "at least 2"),
        (WIDE | {"ubatch_size": 4, "dbo_prefill_token_threshold": 3}, "dbo_prefill_token_threshold", "at least 4"),
        (WIDE | {"ubatch_executor": "process"}, "ubatch_executor", "auto, greenlet, thread"),
        (WIDE | {"ubatch_cut": "middle"}, "ubatch_cut", "equal, cost"),
        ({"emulate_link_gb_per_s": 1.0}, "emulate_link_gb_per_s", "data_parallel_size"),
        (WIDE | {"emulate_link_latency_us": 5.0}, "emulate_link_latency_us", "emulate_link_gb_per_s"),
        (WIDE | {"emulate_link_token_bytes": "1,2"}, "emulate_link_token_bytes", "emulate_link_gb_per_s"),
        (LINK | {"emulate_link_token_bytes": "1"}, "emulate_link_token_bytes", "two numbers"),
        (LINK | {"emulate_link_token_bytes": "1,-2"}, "emulate_link_token_bytes", "two numbers"),
        (LINK | {"emulate_link_token_bytes": "nan,2"}, "emulate_link_token_bytes", "two numbers"),
        ({"seed": 2**63}, "seed", "from 0 to"),
        ({"kv_cache_memory_bytes": 2**63}, "kv_cache_memory_bytes", "from 1 to"),
        ({"max_model_len": 1}, "max_model_len", "from 2 to"),
        ({"max_model_len": 2**40}, "max_model_len", "from 2 to"),
        ({"max_num_batched_tokens": 2**31}, "max_num_batched_tokens", "from 1 to"),
        ({"step_timeout": 10**400}, "step_timeout", "from 0.1 to 86400"),
        ({"step_timeout": float("inf")}, "step_timeout", "from 0.1 to 86400"),
        ({"model": b"x"}, "model", "text"),
        ({"quantization": "awq"}, "quantization", "None"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode", "None, auto"),
        ({"startup_timeout": float("nan")}, "startup_timeout", "from 1 to 86400"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(folder: str, given: dict[str, Any], field: str, allowed: str):
    with pytest.raises(ConfigError) as caught:
        resolve(Options.from_dict({"model": folder, **given}))
    assert caught.value.field == field
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_none_means_not_given(folder: str) -> None:
    given = {option.name: None for option in fields(Options)} | {"model": folder}
    assert Options.from_dict(given) == Options(model=folder)


def test_other_spellings_of_a_value(folder: str) -> None:
    options = Options.from_dict({"model": Path(folder), "seed": np.int64(3), "step_timeout": np.float32(5)})
    assert (options.model, options.seed, options.step_timeout) == (folder, 3, 5.0)
    assert {type(options.model), type(options.seed), type(options.step_timeout)} == {str, int, float}
    assert resolve(options).model_path == folder
    names = {"half": "float16", "float": "float32", "bfloat16": "bfloat16"}
    names |= {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.half: "float16"}
    for given, name in names.items():
        assert Options(dtype=given).dtype == name
    assert Options(load_format="safetensors").load_format == "auto"


def test_vllms_options_without_effect_are_named_in_one_warning(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {"disable_log_stats": True, "swap-space": 4, "tokenizer_mode": "auto", "quantization": None}
    assert Options.from_dict({"model": folder, "revision": "main", **given}) == Options(model=folder)
    [record] = caplog.records
    for name in ("disable_log_stats", "swap_space", "tokenizer_mode", "quantization", "revision"):
        assert name in record.getMessage()


def test_r108_roles_and_balancing_that_are_not_there_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="no prefill and decode roles"):
        Options.from_dict({"kv_transfer_config": {"kv_role": "kv_producer"}})
    with pytest.raises(ConfigError, match="on the command line"):
        Options.from_dict({"data-parallel-external-lb": True})
    nothing = {"data_parallel_external_lb": False, "kv_transfer_config": None}
    assert Options.from_dict(nothing) == Options()


def test_a_host_needs_gpus_for_its_own_ranks_only(folder: str) -> None:
    asked = {"model": folder, "device": "cuda", "data_parallel_size": 16, "enable_expert_parallel": True}
    options = Options.from_dict(asked)
    assert resolve(options, gpus=8, num_local=8).parallel.data_parallel_size == 16
    with pytest.raises(ConfigError, match=r"data_parallel_size_local: 8 .* at most 4"):
        resolve(options, gpus=4, num_local=8)
    with pytest.raises(ConfigError, match=r"data_parallel_size: 16 .* at most 8"):
        resolve(options, gpus=8)


def test_the_kv_cache_has_the_models_dtype(folder: str) -> None:
    for given in ({"kv_cache_dtype": "float32"}, {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}):
        assert resolve(Options.from_dict({"model": folder, "device": "cpu", **given})).dtype == given["kv_cache_dtype"]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'bfloat16' .* allowed: auto or float32"):
        resolve(Options.from_dict({"model": folder, "device": "cpu", "kv_cache_dtype": "bfloat16"}))


def test_only_an_explicit_path_replaces_the_model_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "assets" in model_folder(Options(model="tiny").model).parts
    for model in ("./tiny", Path("tiny"), tmp_path / "tiny"):
        assert model_folder(Options(model=model).model).resolve() == tmp_path / "tiny"


def test_yarn_allows_contexts_as_long_as_it_stretches(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"rope_scaling": rope}))
    assert resolve(Options(model=str(tmp_path))).scheduler.max_model_len == 512
    assert resolve(Options(model=str(tmp_path), max_model_len=1024)).scheduler.max_model_len == 1024
    with pytest.raises(ConfigError, match="at most 1024"):
        resolve(Options(model=str(tmp_path), max_model_len=1025))


def test_auto_values(folder: str) -> None:
    config = resolve(Options(model=folder))
    assert config.dtype == "float32"
    assert config.scheduler.max_model_len == 512
    assert config.scheduler.max_num_seqs == 256
    assert config.parallel.all2all_backend == "local"
    assert config.parallel.expert_parallel_size == 1
    wide = resolve(Options(model=folder, data_parallel_size=3, enable_expert_parallel=True))
    assert wide.parallel.expert_parallel_size == 3
    assert wide.parallel.all2all_backend == "allgather_reducescatter"  # 2 other ranks, top-2
    wider = resolve(Options(model=folder, data_parallel_size=4, enable_expert_parallel=True))
    assert wider.parallel.all2all_backend == "torch"  # 3 other ranks, a token goes to 2 at most
    assert wide.digest != config.digest
    few = resolve(Options(model=folder, max_num_batched_tokens=64))
    assert few.scheduler.max_num_seqs == 64


@pytest.mark.parametrize(
    ("given", "num_ubatches"), [({}, 1), ({"enable_dbo": True}, 2), ({"ubatch_size": 1}, 1), ({"ubatch_size": 3}, 3)]
)
def test_number_of_ubatches(folder: str, given: dict[str, Any], num_ubatches: int) -> None:
    assert resolve(Options(model=folder, **WIDE, **given)).overlap.num_ubatches == num_ubatches


def test_ranks_that_cut_differently_are_told_apart(folder: str) -> None:
    equal, cost = (resolve(Options(model=folder, **WIDE, enable_dbo=True, ubatch_cut=cut)) for cut in ("equal", "cost"))
    assert resolve(Options(model=folder)).overlap.cut == equal.overlap.cut == "equal"
    assert cost.overlap.cut == "cost"
    assert cost.digest != equal.digest


def test_a_forced_split_needs_no_ranks(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    overlap = resolve(Options(model=folder)).overlap
    assert overlap.num_ubatches == 3
    assert overlap.force_split
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "many")
    with pytest.raises(ConfigError, match="HOCKET_FORCE_SPLIT"):
        resolve(Options(model=folder))


def test_deterministic_takes_what_is_batch_invariant(folder: str) -> None:
    plain, deterministic = resolve(Options(model=folder)), resolve(Options(model=folder, deterministic=True))
    assert (plain.attention_backend, plain.moe_backend) == ("sdpa", "auto")
    assert (deterministic.attention_backend, deterministic.moe_backend) == ("tiled", "tiled")
    assert plain.digest != deterministic.digest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"moe_backend": "grouped_mm"}, "experts backend 'grouped_mm' is not available: with deterministic .*: tiled"),
        ({"moe_backend": "reference"}, "experts backend 'reference' is not available: with deterministic .*: tiled"),
        ({"attention_backend": "sdpa"}, "attention backend 'sdpa' is not available: with deterministic .*: tiled"),
    ],
)
def test_deterministic_refuses_what_is_not(folder: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"^{message}$"):
        resolve(Options(model=folder, deterministic=True, **given))
    assert resolve(Options(model=folder, **given))


def test_deterministic_needs_two_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"num_attention_heads": 1, "num_key_value_heads": 1}))
    assert resolve(Options(model=str(tmp_path)))
    with pytest.raises(
        ConfigError, match="deterministic: True is not allowed for a model of one attention head; allowed: false"
    ):
        resolve(Options(model=str(tmp_path), deterministic=True))


def test_replicas_have_no_transport(folder: str) -> None:
    config = resolve(Options(model=folder, data_parallel_size=2))
    assert config.parallel.expert_parallel_size == 1
    assert config.parallel.all2all_backend == "local"


def test_yaml_takes_dashes_and_underscores(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("data-parallel-size: 2\nenable_expert_parallel: true\n")
    options = Options.from_dict({"model": folder, **read_yaml(path)})
    assert options.data_parallel_size == 2
    assert options.enable_expert_parallel
    path.write_text("- not a mapping\n")
    with pytest.raises(ConfigError, match="YAML mapping"):
        read_yaml(path)
    path.write_text("")
    assert read_yaml(path) == {}
    for raw in (b"model: [a\nb: c\n  d: }", b"a: \xff\xfe"):
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match="readable YAML") as caught:
            read_yaml(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="readable YAML"):
        read_yaml(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_experts": 0}, "config.json: num_experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(QWEN | change)
    assert caught.value.field == field


def test_a_missing_or_broken_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ModelConfig.from_pretrained(tmp_path)
    config = dict(QWEN)
    del config["hidden_size"]
    with pytest.raises(ConfigError, match="hidden_size"):
        ModelConfig.from_dict(config)


def test_both_rope_spellings_give_the_same(tmp_path: Path) -> None:
    old = QWEN | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
    new = {k: v for k, v in QWEN.items() if k != "rope_theta"} | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    }
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
