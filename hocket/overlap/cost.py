"""What tokens cost, estimated from the model's shape, and where a rank would like its batch to be cut: into parts of
equal cost. Integers only; knows nothing of what other ranks have."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from hocket.config.model import ModelConfig
from hocket.scheduler.batch import Batch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class TokenCost:
    """FLOPs of one token in all layers: `linear`, and for every token of its context, itself included, one of the
    `*_context`: a decode's, or that of any other token.

    Two FLOPs per active weight, 4 · heads · width · layers per token of context (PaLM, arXiv 2204.02311, appendix B,
    forward pass). Latent attention (arXiv 2405.04434 §2.1) compares and sums latents in a decode, expanded keys and
    values elsewhere. Logits are not counted: they are made of few rows, after the ubatches.
    """

    linear: int
    decode_context: int
    prefill_context: int

    @classmethod
    def of(cls, model: ModelConfig) -> TokenCost:
        heads, mla = model.num_heads, model.mla
        if mla is not None:
            decode = heads * (mla.latent_dim + mla.kv_lora_rank)
            prefill = heads * (mla.qk_head_dim + mla.v_head_dim)
        else:
            decode = prefill = heads * 2 * model.head_dim
        weights = model.num_layers * _attention_weights(model) + sum(_mlp_weights(model))
        return cls(2 * weights, 2 * decode * model.num_layers, 2 * prefill * model.num_layers)

    def of_first(self, count: int, row: ScheduledRequest) -> int:
        """The first `count` of a request's tokens of this step: the context grows by one with each."""
        context = self.decode_context if row.num_tokens == 1 else self.prefill_context
        return count * self.linear + context * (count * row.start + count * (count + 1) // 2)


def _attention_weights(model: ModelConfig) -> int:
    hidden, heads, mla = model.hidden_size, model.num_heads, model.mla
    if mla is None:
        return hidden * (2 * heads + 2 * model.num_kv_heads) * model.head_dim
    queries = heads * mla.qk_head_dim
    query = hidden * queries if mla.q_lora_rank is None else (hidden + queries) * mla.q_lora_rank
    expansion = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + hidden * mla.latent_dim + expansion + heads * mla.v_head_dim * hidden


def _mlp_weights(model: ModelConfig) -> list[int]:
    """Weights a token meets in each layer: gate, up and down of the dense MLP, or router and chosen experts."""
    hidden, moe = model.hidden_size, model.moe
    dense = 3 * hidden * model.intermediate_size
    chosen = moe.top_k + moe.num_shared_experts
    sparse = hidden * moe.num_experts + 3 * hidden * moe.intermediate_size * chosen
    return [sparse if is_sparse else dense for is_sparse in moe.layers]


@dataclass(frozen=True, slots=True)
class Wish:
    """Where a rank would like its batch to be cut, as token numbers, and what the whole batch costs, in tokens without
    context (rounded up)."""

    cuts: tuple[int, ...]
    cost: int


def wished_cuts(batch: Batch, cost: TokenCost, num_ubatches: int) -> Wish:
    """The cuts into `num_ubatches` parts of equal cost, each at the boundary of two tokens that comes nearest.

    No part is empty if there are tokens enough. Requests of a uniform decode are not cut.
    """
    unit = batch.uniform_query or 1
    num_units = batch.num_tokens // unit
    rows = batch.requests
    starts = [0, *accumulate(row.num_tokens for row in rows)]
    before = [0, *accumulate(cost.of_first(row.num_tokens, row) for row in rows)]

    def cost_of(units: int) -> int:
        """Of the first tokens, times `num_ubatches`: so what a cut aims at is a whole number."""
        token = units * unit
        i = bisect_right(starts, token) - 1
        inside = cost.of_first(token - starts[i], rows[i]) if token > starts[i] else 0
        return num_ubatches * (before[i] + inside)

    cuts = []
    for i in range(1, num_ubatches):
        cut = _nearest(cost_of, num_units, before[-1] * i)
        cuts.append(unit * max(0, min(max(cut, i), num_units - num_ubatches + i)))
    return Wish(tuple(cuts), -(-before[-1] // cost.linear))


def _nearest(cost_of: Callable[[int], int], last: int, target: int) -> int:
    """The number in 0 … `last` whose cost, which grows with it, is nearest to `target`; of two the lower."""
    above = bisect_left(range(last + 1), target, key=cost_of)
    if above and cost_of(above) - target >= target - cost_of(above - 1):
        return above - 1
    return above
