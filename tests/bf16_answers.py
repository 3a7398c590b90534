"""Judges an engine's bf16 answers against transformers: fp32 is the truth, transformers' own bf16 runs the measure.

Two right bf16 programs differ from each other and from fp32, so tokens are compared teacher-forced, on what the engine
itself said: see `Figures`. Models are random, at any width, made on the device that also computes the references.

Legend: N generated tokens of one request, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.outputs import RequestOutput

SHAPES = Path(__file__).resolve().parents[1] / "benchmarks" / "shapes"
SLACK = 1.2
"""How much farther from fp32 than the worse of transformers' two bf16 runs the engine may be."""
GAIN, EMBEDDING_STD = 0.8, 0.1
"""Standard deviations of rows of unit variance behind a random matrix, and of an embedding: what `checkpoints.py` comes
to at its width."""
ROUTER_GAIN, EXPERTS_GAIN = 1.28, 0.4
"""Of routers, and of the last matrices of routed experts, scaling included: at some token in ten a router in bf16
chooses another expert, and if that changed much then no token would be decisive, see `Figures`."""
TEXT_LENGTH, BEST = 100, 20
"""Of random texts over which transformers' largest difference is measured, and how many of the most likely tokens are
looked at there: over the few tokens of an answer a largest difference is luck."""


def published(name: str, **changes: Any) -> Any:
    """transformers' config of a folder in benchmarks/shapes, with some entries changed."""
    from transformers import AutoConfig

    values = json.loads((SHAPES / name / "config.json").read_text())
    values |= {"bos_token_id": None, "eos_token_id": 2, "num_nextn_predict_layers": 0, **changes}
    del values["torch_dtype"]
    return AutoConfig.for_model(values.pop("model_type"), **values)


_SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
}
_SMALL_MLA: dict[str, Any] = {
    **_SMALL,
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
SMALL: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _SMALL_MLA,
    "deepseek-v3": {**_SMALL_MLA, "q_lora_rank": 96, "n_routed_experts": 32, "first_k_dense_replace": 1},
    "qwen3-30b-a3b": {**_SMALL, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 32},
}
"""What makes published models small enough for a CPU."""


def small(name: str) -> Any:
    """As `published`, small."""
    return published(name, **SMALL[name])


def random_model(config: Any, device: str, seed: int = 0) -> Any:
    """transformers' model of a config in bf16, with random weights that make logits depend on every part of it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                value.normal_(std=0.15)
            elif "norm" in name:
                value.add_(torch.randn_like(value), alpha=0.2)
            elif "embed_tokens" in name:
                value.normal_(std=EMBEDDING_STD)
            elif "inv_freq" not in name:
                value.normal_(std=_gain(name, config) / math.sqrt(value.shape[-1]))
    return model.eval()


def _gain(name: str, config: Any) -> float:
    if name.endswith("experts.down_proj"):
        return EXPERTS_GAIN / getattr(config, "routed_scaling_factor", 1.0)
    return ROUTER_GAIN if name.endswith("gate.weight") else GAIN


@dataclass(frozen=True)
class Runs:
    """What three runs of transformers say at the same places: logits [..., V] on their device, as fp32."""

    fp32: Tensor
    eager: Tensor
    sdpa: Tensor

    def differences(self, places: Any) -> tuple[Tensor, Tensor]:
        """At `places`, an index: fp32's log-probabilities, and |difference| of both bf16 runs to them, [2, ...]."""
        truth, *bf16 = (logits.log_softmax(-1)[places] for logits in (self.fp32, self.eager, self.sdpa))
        return truth, torch.stack([(found - truth).abs() for found in bf16])


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How an engine compares.

    decisive: tokens at which fp32's two best logits are farther apart than `threshold`, twice the largest difference
    between the logits of transformers' two bf16 runs. differing: where the engine's token is not fp32's best one;
    wrong: where that is decisive. mean, largest: |log-probability − fp32's| of the tokens that the engine gave
    log-probabilities of; bf16_mean: of the same tokens, the larger of transformers' two bf16 runs; bf16_largest: of
    these and of the judge's random texts.
    """

    tokens: int
    decisive: int
    differing: int
    wrong: int
    threshold: float
    mean: float
    largest: float
    bf16_mean: float
    bf16_largest: float

    @staticmethod
    def header() -> str:
        return " ".join(f"{field.name:>12}" for field in fields(Figures))

    def __str__(self) -> str:
        values = (getattr(self, field.name) for field in fields(self))
        return " ".join(f"{value:12.5f}" if isinstance(value, float) else f"{value:12}" for value in values)

    def faults(self) -> list[str]:
        """What is not as it must be."""
        found = []
        if self.wrong:
            found.append(f"{self.wrong} tokens are not fp32's where it is sure")
        if not self.mean <= SLACK * self.bf16_mean:  # so that NaN is a fault
            found.append(f"mean {self.mean:.5f} is more than {SLACK} × {self.bf16_mean:.5f}")
        if not self.largest <= SLACK * self.bf16_largest:
            found.append(f"largest {self.largest:.5f} is more than {SLACK} × {self.bf16_largest:.5f}")
        return found


class Judge:
    """The references of one model, kept on its device, and its checkpoint at `path`."""

    def __init__(self, config: Any, path: Path, device: str, num_texts: int = 12, seed: int = 0) -> None:
        self.path = path
        self._device = device
        self._vocab_size = int(config.vocab_size)
        self._bf16 = random_model(config, device, seed)
        self._bf16.save_pretrained(path, max_shard_size="2GB")
        self._fp32 = copy.deepcopy(self._bf16).float()
        self._fp32.set_attn_implementation("eager")
        self._fp32.set_experts_implementation("eager")
        self.answer = functools.cache(self._answer)
        self._bf16_largest = self._largest_of_texts(num_texts)

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        """Random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, self._vocab_size, (length,), generator=generator).tolist() for length in lengths]

    def _answer(self, token_ids: tuple[int, ...], num_prompt_tokens: int) -> Runs:
        """Of what followed a prompt, logits [N, V]."""
        runs = self._run(torch.tensor([token_ids], device=self._device))
        kept = (getattr(runs, field.name)[0, num_prompt_tokens - 1 : -1] for field in fields(Runs))
        return Runs(*kept)

    @torch.no_grad()
    def _run(self, ids: Tensor) -> Runs:
        """Of int64 [B, T] logits [B, T, V]."""
        fp32 = self._fp32(ids, use_cache=False).logits
        bf16 = []
        for attention in ("eager", "sdpa"):
            self._bf16.set_attn_implementation(attention)
            bf16.append(self._bf16(ids, use_cache=False).logits.float())
        return Runs(fp32, *bf16)

    def _largest_of_texts(self, num_texts: int) -> float:
        runs = self._run(torch.tensor(self.prompts([TEXT_LENGTH] * num_texts, seed=1), device=self._device))
        best = runs.fp32.topk(BEST).indices
        rows, columns = (torch.arange(size, device=self._device) for size in best.shape[:2])
        return float(runs.differences((rows[:, None, None], columns[:, None], best))[1].max())

    def figures(self, results: Sequence[RequestOutput]) -> Figures:
        """Of greedy completions with log-probabilities. (Of those without: everything but mean and largest.)"""
        threshold = 0.0
        gaps, differing, ours, theirs = [], [], [], []
        for result in results:
            completion, prompt = result.outputs[0], result.prompt_token_ids
            runs = self.answer((*prompt, *completion.token_ids), len(prompt))
            threshold = max(threshold, 2 * float((runs.eager - runs.sdpa).abs().max()))
            best = runs.fp32.topk(2)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            differing.append(best.indices[:, 0] != torch.tensor(completion.token_ids, device=self._device))
            of_ours, of_theirs = _differences(runs, completion.logprobs or [])
            ours.append(of_ours)
            theirs.append(of_theirs)
        gap, is_other, own, bf16 = torch.cat(gaps), torch.cat(differing), torch.cat(ours), torch.cat(theirs, 1)
        is_decisive = gap > threshold
        return Figures(
            tokens=len(gap),
            decisive=int(is_decisive.sum()),
            differing=int(is_other.sum()),
            wrong=int((is_other & is_decisive).sum()),
            threshold=threshold,
            mean=float(own.mean()) if len(own) else 0.0,
            largest=float(own.max()) if len(own) else 0.0,
            bf16_mean=float(bf16.mean(1).max()) if len(own) else 0.0,
            bf16_largest=max(self._bf16_largest, float(bf16.max()) if len(own) else 0.0),
        )


def _differences(runs: Runs, given: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """|log-probability − fp32's| of all tokens that an engine gave one of: its own, and [2, …] of the bf16 runs."""
    rows = [row for row, position in enumerate(given) for _ in position]
    ids = [token_id for position in given for token_id in position]
    said = [logprob.logprob for position in given for logprob in position.values()]
    truth, bf16 = runs.differences((rows, ids))
    return (truth.new_tensor(said) - truth).abs(), bf16
