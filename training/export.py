"""Write a checkpoint of ``train.py`` as a Hugging Face folder in bfloat16, and compare it with ``transformers``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from model import Tiny, TinyConfig
from safetensors.torch import save_file
from tokenizer import BOS_ID, EOS_ID
from torch import Tensor


def tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names of published checkpoints: one tensor an expert and projection."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.bfloat16()
        prefix = name.rpartition(".")[0]
        if name.endswith("experts.gate_up"):
            for e, (gate, up) in enumerate(v.chunk(2, 0) for v in value):
                result[f"{prefix}.{e}.gate_proj.weight"] = gate
                result[f"{prefix}.{e}.up_proj.weight"] = up
        elif name.endswith("experts.down"):
            result.update({f"{prefix}.{e}.down_proj.weight": down for e, down in enumerate(value)})
        else:
            result[name] = value
    return {k if k.startswith("lm_head") else f"model.{k}": v.contiguous() for k, v in result.items()}


def model_config(c: TinyConfig) -> dict[str, object]:
    """Return the contents of ``config.json``."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "first_k_dense_replace": c.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "kv_lora_rank": c.kv_lora_rank,
        "max_position_embeddings": c.max_position_embeddings,
        "mlp_bias": False,
        "moe_intermediate_size": c.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": c.n_routed_experts,
        "n_shared_experts": c.n_shared_experts,
        "norm_topk_prob": False,
        "num_attention_heads": c.num_attention_heads,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_attention_heads,
        "q_lora_rank": None,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "routed_scaling_factor": c.routed_scaling_factor,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": c.v_head_dim,
        "vocab_size": c.vocab_size,
    }


def generation_config() -> dict[str, object]:
    """Return the contents of ``generation_config.json``."""
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }


@torch.no_grad()
def difference(model: Tiny, folder: Path) -> float:
    """Return the largest difference of logits from ``transformers``' model of the folder, in float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.c.vocab_size, (2, model.c.max_position_embeddings), generator=generator)
    return float((model(ids) - reference(input_ids=ids).logits).abs().max())


def main() -> None:
    """Export, then check."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=here / "work" / "run" / "last.pt")
    parser.add_argument("--out", type=Path, default=here.parent / "hocket" / "assets" / "tiny")
    args = parser.parse_args()
    state = torch.load(args.checkpoint, weights_only=True)
    config = TinyConfig(**state["config"])
    args.out.mkdir(parents=True, exist_ok=True)
    weights = tensors(state["model"])
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config", model_config(config)), ("generation_config", generation_config())):
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"{sum(v.numel() for v in weights.values()):,} parameters in {len(weights)} tensors")
    model = Tiny(config).eval()
    model.load_state_dict({k: v.bfloat16().float() for k, v in state["model"].items()})
    worst = difference(model, args.out)
    print(f"largest difference of logits from transformers: {worst:.2e}")
    if worst >= 1e-4:
        raise SystemExit("the exported model does not agree with transformers")


if __name__ == "__main__":
    main()
