"""The least time one rank's step can take: its bytes and FLOPs against a device's rates. Knows no engine and no torch.

Legend: T tokens of the step, D hidden, H heads, E experts, K top-k, I intermediate, R ranks that share the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hocket.config.model import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_BYTES = 1
SCALE_BYTES = 4
READ_ONCE = ("attention", "logits")
"""Parts of a step that are read once also where it runs in ubatches."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches: bytes/s of memory, FLOP/s of matrix products in the model's dtype and in fp8.

    source: where the figures come from.
    """

    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One rank's step: its tokens, the cached rows it reads, (query, visible key) pairs, and rows that get logits."""

    num_tokens: float
    cached_rows: float
    pairs: float
    num_logits: float
    is_decode: bool

    @classmethod
    def decode(cls, num_requests: int, context: float) -> StepShape:
        """One token for each request; `context` counts the tokens that it sees, itself included."""
        rows = num_requests * context
        return cls(num_tokens=num_requests, cached_rows=rows, pairs=rows, num_logits=num_requests, is_decode=True)

    @classmethod
    def prefill(cls, num_tokens: int, prompt_len: int) -> StepShape:
        """Whole prompts of `prompt_len` tokens; where a step cuts one, the next one has the rest."""
        return cls(
            num_tokens=num_tokens,
            cached_rows=num_tokens,
            pairs=num_tokens * (prompt_len + 1) / 2,
            num_logits=num_tokens / prompt_len,
            is_decode=False,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes read and FLOPs of one kind of work in all layers; is_fp8: its products run in fp8."""

    name: str
    num_bytes: float
    flops: float
    is_fp8: bool = False

    def us(self, rates: Rates) -> float:
        return max(self.num_bytes / rates.bytes_per_s, self.flop_s(rates)) * 1e6

    def flop_s(self, rates: Rates) -> float:
        return self.flops / (rates.fp8_flops_per_s if self.is_fp8 else rates.flops_per_s)


def step_parts(config: ModelConfig, step: StepShape, ep_size: int, dtype: str, *, is_fp8: bool = False) -> list[Part]:
    """What one of `ep_size` ranks, all with such a step, reads and computes.

    Weights are read once, of experts those that expect a row (`distinct_experts`); a weight of w elements takes 2 · w
    FLOPs per row. `is_fp8`: projections and experts have a byte per element and an fp32 scale per block; router, logits
    and cache stay in `dtype`. Left out: activations, norms, the embedding's rows, writing the cache, communication.
    """
    element = BYTES[dtype]
    layers, sparse = config.num_layers, sum(config.moe.layers)
    weight = element if not is_fp8 else _fp8_element_bytes(config)

    def product(name: str, elements: float, rows: float, element_bytes: float, fp8: bool = False) -> Part:
        return Part(name=name, num_bytes=elements * element_bytes, flops=2 * elements * rows, is_fp8=fp8)

    moe, tokens, hidden = config.moe, step.num_tokens, config.hidden_size
    expert = 3 * hidden * moe.intermediate_size
    read = distinct_experts(moe.num_experts, ep_size, tokens * ep_size, moe.top_k)
    return [
        product("projections", layers * _attention_elements(config), tokens, weight, is_fp8),
        _attention(config, step, element),
        product("dense_mlp", (layers - sparse) * 3 * hidden * config.intermediate_size, tokens, weight, is_fp8),
        product("shared_experts", sparse * moe.num_shared_experts * expert, tokens, weight, is_fp8),
        product("router", sparse * hidden * moe.num_experts, tokens, element),
        Part(
            name="experts",
            num_bytes=sparse * read * expert * weight,
            flops=sparse * 2 * expert * tokens * moe.top_k,  # as many rows come as go where all ranks are alike
            is_fp8=is_fp8,
        ),
        product("logits", config.vocab_size * hidden, step.num_logits, element),
    ]


def split_parts(
    config: ModelConfig, step: StepShape, ep_size: int, dtype: str, num_ubatches: int, *, is_fp8: bool = False
) -> list[Part]:
    """The same of a step that runs in equal ubatches: each of them reads the weights. Once for all are read the cache
    and, as logits are computed of what all give, the output layer."""
    part_of = replace(step, num_tokens=step.num_tokens / num_ubatches)
    whole = step_parts(config, step, ep_size, dtype, is_fp8=is_fp8)
    parts = step_parts(config, part_of, ep_size, dtype, is_fp8=is_fp8)
    times = partial(_times, num_ubatches)
    return [one if one.name in READ_ONCE else times(part) for one, part in zip(whole, parts, strict=True)]


def _times(count: int, part: Part) -> Part:
    return replace(part, num_bytes=count * part.num_bytes, flops=count * part.flops)


def distinct_experts(num_experts: int, ep_size: int, num_tokens: float, top_k: int) -> float:
    """Experts of one rank that get a row, in expectation: E / R · (1 - (1 - K / E)^tokens), routing uniform.

    num_tokens: of all ranks. With several rows per expert these are all of the rank's experts.
    """
    return num_experts / ep_size * (1 - float((1 - top_k / num_experts) ** num_tokens))


def _fp8_element_bytes(config: ModelConfig) -> float:
    rows, columns = config.quantization.block if config.quantization else (128, 128)
    return FP8_BYTES + SCALE_BYTES / (rows * columns)


def _attention_elements(config: ModelConfig) -> int:
    """Elements of one layer's projections. Absorbed or not, MLA multiplies each token with all of them."""
    hidden, heads = config.hidden_size, config.num_heads
    mla = config.mla
    if mla is None:
        return config.head_dim * hidden * (2 * heads + 2 * config.num_kv_heads)
    query = heads * mla.qk_head_dim
    queries = hidden * query if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + query)
    latents = hidden * mla.latent_dim + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latents + heads * mla.v_head_dim * hidden


def _attention(config: ModelConfig, step: StepShape, element: int) -> Part:
    """Scores and weighted sums, 2 FLOPs for each (pair, head, component). MLA is absorbed in decodes alone."""
    mla = config.mla
    if mla is None:
        row, components = 2 * config.num_kv_heads * config.head_dim, 2 * config.head_dim
    elif step.is_decode:
        row, components = mla.latent_dim, mla.latent_dim + mla.kv_lora_rank
    else:
        row, components = mla.latent_dim, mla.qk_head_dim + mla.v_head_dim
    return Part(
        name="attention",
        num_bytes=config.num_layers * step.cached_rows * row * element,
        flops=config.num_layers * 2 * step.pairs * config.num_heads * components,
    )


def floor_of(parts: Sequence[Part], rates: Rates | None) -> dict[str, Any]:
    """Totals and, where `rates` are known, times in µs.

    us = max(Σ bytes / bytes_per_s, Σ flop time): no order of the parts can be faster, for while one part reads another
    may compute. serial_us = Σ max(bytes / bytes_per_s, flop time) over the parts: one after the other.
    """
    found: dict[str, Any] = {
        "bytes": sum(part.num_bytes for part in parts),
        "flops": sum(part.flops for part in parts),
        "parts": {part.name: {"bytes": part.num_bytes, "flops": part.flops} for part in parts},
        "us": None,
        "serial_us": None,
        "rates": None,
    }
    if rates is not None:
        flop_s = sum(part.flop_s(rates) for part in parts)
        found["us"] = max(found["bytes"] / rates.bytes_per_s, flop_s) * 1e6
        found["serial_us"] = sum(part.us(rates) for part in parts)
        found["rates"] = {
            "bytes_per_s": rates.bytes_per_s,
            "flops_per_s": rates.flops_per_s,
            "fp8_flops_per_s": rates.fp8_flops_per_s,
            "source": rates.source,
        }
    return found
