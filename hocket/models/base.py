"""A causal language model: embedding, layers, logits. Knows nothing of files, requests, ranks or ubatches.

Legend: T tokens (padding included), D hidden, V vocabulary, N rows whose logits are wanted.
"""

# ruff: noqa: RUF009 (sliced() makes a dataclass field)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.attention.base import AttentionMetadata, Sliceable, sliced
from hocket.attention.plan import Plan
from hocket.cache.storage import block_size_of, slot_bytes_of
from hocket.config.model import ModelConfig
from hocket.envs import FP8
from hocket.layers.kernels import PLAIN, Kernels
from hocket.layers.linear import frozen
from hocket.layers.mlp import GatedMLP
from hocket.layers.norm import RMSNorm
from hocket.layers.rotary import RotaryEmbedding, Rotation
from hocket.models.backends import DEFAULT, Backends, Product
from hocket.models.quantize import hold_in_fp8
from hocket.models.weights import WeightSpec, mlp_specs, moe_specs, norm_spec, tensor_spec
from hocket.moe.base import TokenLayout
from hocket.moe.factory import MoEFactory
from hocket.moe.layer import MoELayer
from hocket.quant import fp8
from hocket.trace import spans
from hocket.trace.spans import Stage


@dataclass(frozen=True, kw_only=True)
class UBatchInputs(Sliceable):
    """What a model reads of a batch, or of a part of one. token_ids, positions: int64 [T]; padding rows hold 0."""

    token_ids: Tensor = sliced("tokens")
    positions: Tensor = sliced("tokens_last")
    attention: AttentionMetadata = sliced("rebuilt")
    layout: TokenLayout = sliced("rebuilt")


class Attention(nn.Module, ABC):
    """A model's attention block, projections included."""

    @abstractmethod
    def forward(self, x: Tensor, rotation: Rotation, plan: Plan, cache: Tensor) -> Tensor:
        """x [T, D] (normalised) → [T, D]; writes this step's rows into `cache`, the layer's KV cache."""

    @abstractmethod
    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        """The block's tensors under `prefix`."""

    def products(self) -> Iterator[Product]:
        """Matrix products of the block that are not of its Linear layers."""
        return iter(())


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mlp is dense or sparse.

    The last additions are left to the norm that comes next, which does all at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        mlp: GatedMLP | MoELayer,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels = PLAIN,
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype, kernels=kernels)
        self.input_norm = norm()
        self.attention = attention
        self.post_attention_norm = norm()
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        shared: Tensor | None,
        rotation: Rotation,
        plan: Plan,
        layout: TokenLayout,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states [T, D] as summands: x, the residual (None: there is x alone) and what shared experts add (None:
        there are none) → the same three."""
        spans.begin(Stage.QKV)
        x, residual = self.input_norm.of_sum(x, residual, shared)
        x, residual = self.post_attention_norm.of_sum(self.attention(x, rotation, plan, cache), residual)
        if isinstance(self.mlp, MoELayer):
            out, shared = self.mlp.summands(x, layout)
            return out, residual, shared
        return self.mlp(x), residual, None


class CausalLM(nn.Module, ABC):
    """Base of all models. A subclass says what its attention is; weights are unset until loaded."""

    router_dtype: torch.dtype | None = torch.float32
    """Dtype of router weights and logits; None: the model's."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEFactory,
        device: torch.device,
        dtype: torch.dtype,
        backends: Backends = DEFAULT,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.backends = backends
        self._placement, self._ep_rank = moe.placement, moe.rank
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = frozen(torch.empty(vocabulary, device=device, dtype=dtype))
        self.rotary = RotaryEmbedding(config.rope, device, exact=backends.kernels.batch_invariant)
        self.fp8_reason = self._fp8_reason(device)
        self.layers = nn.ModuleList(self._build_layer(i, moe, device) for i in range(config.num_layers))
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype, kernels=backends.kernels
        )
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else frozen(torch.empty(vocabulary, device=device, dtype=dtype))
        )

    @abstractmethod
    def build_attention(self, device: torch.device) -> Attention:
        """One layer's attention block."""

    def _fp8_reason(self, device: torch.device) -> str | None:
        """Why a checkpoint in fp8 is expanded, None where it is not."""
        if self.backends.kernels.batch_invariant:
            return "fp8 kernels are not batch-invariant"
        if FP8.get_int(0) == 0:
            return f"{FP8.name} is 0"
        if self.config.quantization is None:
            return "config.json has no quantization_config"
        return fp8.unsupported_reason(device, self.dtype, self.config.quantization.block)

    def _build_layer(self, layer_idx: int, moe: MoEFactory, device: torch.device) -> DecoderLayer:
        mlp = self._build_mlp(layer_idx, moe, device)
        attention, kernels = self.build_attention(device), self.backends.kernels
        layer = DecoderLayer(self.config, attention, mlp, device, self.dtype, kernels)
        quantization = self.config.quantization
        if quantization is not None and self.fp8_reason is None:
            specs = self._layer_specs(f"model.layers.{layer_idx}", layer)
            hold_in_fp8(layer, specs, quantization, moe, self.dtype)
        return layer

    def _build_mlp(self, layer_idx: int, moe: MoEFactory, device: torch.device) -> GatedMLP | MoELayer:
        config, sparse, kernels = self.config, self.config.moe, self.backends.kernels
        mlp = partial(GatedMLP, config.hidden_size, device=device, dtype=self.dtype, kernels=kernels)
        if not sparse.layers[layer_idx]:
            return mlp(config.intermediate_size)
        shared = None
        if sparse.num_shared_experts:
            shared = mlp(sparse.intermediate_size * sparse.num_shared_experts)
        return moe.build(
            sparse,
            config.hidden_size,
            config.hidden_act,
            shared,
            device,
            self.dtype,
            router_dtype=self.router_dtype or self.dtype,
            kernels=kernels,
        )

    def forward(self, inputs: UBatchInputs, kv_cache: list[Tensor], plan: Plan | None = None) -> Tensor:
        """Final normalised hidden states [T, D]; one KV cache per layer is read and written. T may be 0.

        plan: the attention's, where it is made already (`AttentionBackend.decode_plan`), else made here.
        Rows of padding hold anything; no real row depends on them.
        """
        x, residual, shared = F.embedding(inputs.token_ids, self.embed_tokens), None, None
        rotation = self.rotary(inputs.positions, inputs.attention.max_seq_len - 1)
        if plan is None:
            first = kv_cache[0]
            plan = self.backends.attention.plan(
                inputs.attention, x.shape[0], block_size_of(first), self.dtype, slot_bytes_of(first)
            )
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x, residual, shared = layer(x, residual, shared, rotation, plan, inputs.layout, cache)
        return self.norm.of_sum(x, residual, shared)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] → fp32 [N, V]."""
        return self.backends.kernels.logits(hidden, self.lm_head)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor of a published checkpoint of this model, this rank's and the others'."""
        embedding = "model.embed_tokens.weight"
        yield tensor_spec(embedding, self.embed_tokens)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from self._layer_specs(f"model.layers.{i}", layer)
        yield norm_spec("model.norm", self.norm)
        if not self.config.tie_word_embeddings:
            yield tensor_spec("lm_head.weight", self.lm_head)
        else:
            shape = tuple(self.embed_tokens.shape)
            yield WeightSpec(name="lm_head.weight", shape=shape, target=None, equal_to=embedding)

    def _layer_specs(self, prefix: str, layer: DecoderLayer) -> Iterator[WeightSpec]:
        yield norm_spec(f"{prefix}.input_layernorm", layer.input_norm)
        yield from layer.attention.weight_specs(f"{prefix}.self_attn")
        yield norm_spec(f"{prefix}.post_attention_layernorm", layer.post_attention_norm)
        if isinstance(layer.mlp, MoELayer):
            yield from moe_specs(f"{prefix}.mlp", layer.mlp, self._placement, self._ep_rank)
        else:
            yield from mlp_specs(f"{prefix}.mlp", layer.mlp)
