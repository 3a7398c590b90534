"""What a checkpoint's `config.json` says, as frozen values. Knows nothing of tensors, ranks or devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.config.moe import MoEConfig, read_moe
from hocket.config.values import Values
from hocket.errors import CheckpointError, ConfigError

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "qwen3_moe")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `dim` counts the rotated components of a head; `interleaved` pairs neighbours."""

    rope_type: str
    theta: float
    dim: int
    interleaved: bool
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks of the latents and head widths."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: the compressed latent and the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class Fp8BlockConfig:
    """Block-scaled fp8 weights: one fp32 `weight_scale_inv` per `block` of rows × columns.

    not_converted: parts of the names of modules that were left as they are.
    """

    block: tuple[int, int]
    not_converted: tuple[str, ...] = ()

    def leaves(self, name: str) -> bool:
        """Whether the tensor or module `name` is in a module that was left as it is."""
        return any(f".{_inside(part)}." in f".{_inside(name)}." for part in self.not_converted)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's shape and arithmetic, independent of how `config.json` spells it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int
    dtype: str
    rope: RopeConfig
    mla: MLAConfig | None
    moe: MoEConfig
    num_nextn_predict_layers: int = 0
    quantization: Fp8BlockConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def longest_context(self) -> int:
        """Positions the model can tell apart: more than max_position_embeddings where YaRN stretches them further."""
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope.factor * self.rope.original_max_position_embeddings))

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` in the folder `path`.

        Raises:
            CheckpointError: the folder or file is missing or is not JSON.
            ConfigError: the model is not one Hocket runs, or a value makes no sense.
        """
        return cls.from_dict(read_json(Path(path) / "config.json"))

    @classmethod
    def from_dict(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Build from the content of a Hugging Face `config.json` (transformers 4 or 5 spelling)."""
        hf = _text_config(hf)
        model_type = hf.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError("model_type", model_type, ", ".join(MODEL_TYPES) + _unbuilt_layers(hf))
        return _build(cls, str(model_type), Values(hf, "config.json"))


def _inside(name: str) -> str:
    """From `layers.` on: what stands before it differs between a model and a larger one around it."""
    return name[max(name.find("layers."), 0) :]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError in one line if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; a model is a folder on this machine (nothing is downloaded)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a nested (multi-modal) configuration."""
    inner = hf.get("text_config")
    if hf.get("model_type") not in MODEL_TYPES and isinstance(inner, Mapping):
        outer = {key: hf[key] for key in ("quantization_config", "tie_word_embeddings", "dtype") if key in hf}
        return {**outer, **inner}
    return hf


def _unbuilt_layers(hf: Mapping[str, Any]) -> str:
    """What else than full attention a model's layers are, as its configuration tells: named when it is refused."""
    kinds = [str(kind) for kind in dict.fromkeys(hf.get("layer_types") or ()) if kind != "full_attention"]
    if not kinds and any(key.startswith("linear_") for key in hf):
        kinds = ["linear_attention"]
    return f" (layers of {' and '.join(kinds).replace('_', ' ')} are not built)" if kinds else ""


def _build(cls: type[ModelConfig], model_type: str, hf: Values) -> ModelConfig:
    num_layers = hf.whole("num_hidden_layers", most=10_000)
    num_heads = hf.whole("num_attention_heads")
    hidden_size = hf.whole("hidden_size")
    mla = None if model_type == "qwen3_moe" else _mla(hf)
    head_dim = mla.qk_head_dim if mla else hf.whole("head_dim", max(1, hidden_size // num_heads))
    num_kv_heads = num_heads if mla else hf.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise hf.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if hf.text("hidden_act", "silu") != "silu":
        raise ConfigError("hidden_act", hf.values["hidden_act"], "silu")
    if hf.flag("use_sliding_window", False):
        raise ConfigError("use_sliding_window", True, "false (sliding-window attention is not built)")
    return cls(
        model_type=model_type,
        vocab_size=hf.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6, above=False),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        attention_bias=hf.flag("attention_bias", False),
        max_position_embeddings=hf.whole("max_position_embeddings", least=2),
        dtype=_dtype(hf),
        rope=_rope(model_type, hf, mla.qk_rope_head_dim if mla else head_dim),
        mla=mla,
        moe=read_moe(model_type, hf, num_layers),
        num_nextn_predict_layers=_num_nextn(model_type, hf),
        quantization=_quantization(hf),
        eos_token_ids=hf.wholes("eos_token_id"),
    )


def _num_nextn(model_type: str, hf: Values) -> int:
    key = hf.first_of("num_nextn_predict_layers", "num_mtp_layers")
    return hf.whole(key, int(model_type == "deepseek_v3" and key not in hf), least=0, most=100)


def _dtype(hf: Values) -> str:
    name = hf.text(hf.first_of("dtype", "torch_dtype"), "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError("config.json: dtype", name, ", ".join(DTYPES))
    return name


def _mla(hf: Values) -> MLAConfig:
    # null: queries are not compressed; absent: transformers' default.
    compressed = bool(hf.values.get("q_lora_rank", True))
    return MLAConfig(
        q_lora_rank=hf.whole("q_lora_rank", 1536) if compressed else None,
        kv_lora_rank=hf.whole("kv_lora_rank"),
        qk_nope_head_dim=hf.whole("qk_nope_head_dim"),
        qk_rope_head_dim=hf.whole("qk_rope_head_dim"),
        v_head_dim=hf.whole("v_head_dim"),
    )


def _rope(model_type: str, hf: Values, dim: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), `rope_theta` with `rope_scaling` (as published)."""
    outer = {key: hf.values[key] for key in ("rope_theta", "partial_rotary_factor") if key in hf}
    inner = {k: v for key in ("rope_scaling", "rope_parameters") for k, v in hf.object(key).items() if v is not None}
    given = Values(outer | inner, "config.json")
    key = given.first_of("rope_type", "type")
    rope_type = given.text(key, "default")
    if rope_type not in ("default", "yarn", "linear"):
        raise ConfigError("rope_type", rope_type, "default, linear, yarn")
    max_positions = hf.whole("max_position_embeddings", least=2)
    original = given.whole("original_max_position_embeddings", max_positions)
    interleaved = model_type == "deepseek_v2" or (model_type == "deepseek_v3" and hf.flag("rope_interleave", True))
    width = dim * given.number("partial_rotary_factor", 1.0)
    if not 2 <= width <= dim or width % 2:
        raise ConfigError("config.json: width of the rotated part of a head", width, f"an even number, 2 to {dim}")
    return RopeConfig(
        rope_type=rope_type,
        theta=given.number("rope_theta", 10000.0, least=1.0),
        dim=int(width),
        interleaved=interleaved,
        factor=given.number("factor", max_positions / original),
        original_max_position_embeddings=original,
        beta_fast=given.number("beta_fast", 32.0),
        beta_slow=given.number("beta_slow", 1.0),
        mscale=given.number("mscale", 0.0, above=False),
        mscale_all_dim=given.number("mscale_all_dim", 0.0, above=False),
        attention_factor=given.number("attention_factor", 1.0) if "attention_factor" in given else None,
        truncate=given.flag("truncate", True),
    )


def _quantization(hf: Values) -> Fp8BlockConfig | None:
    quant = hf.object("quantization_config")
    if not quant:
        return None
    block = quant.get("weight_block_size")
    if quant.get("quant_method") != "fp8" or not block:
        raise ConfigError("quantization_config", quant.get("quant_method"), "fp8 with weight_block_size")
    sizes = Values(quant, "config.json: quantization_config").wholes("weight_block_size", least=1)
    if len(sizes) != 2:
        raise ConfigError("config.json: weight_block_size", block, "two whole numbers")
    key = next((k for k in ("modules_to_not_convert", "ignored_layers") if quant.get(k) is not None), None)
    names = quant[key] if key else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"config.json: {key}", names, "a list of names")
    return Fp8BlockConfig(block=(sizes[0], sizes[1]), not_converted=tuple(names))
