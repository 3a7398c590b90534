"""Runs a model on any mix of requests over a paged cache, as a rank would, with every trap set. For tests only.

Cache pages start as NaN and are handed out in random order, so a read of anything unwritten shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.cache.storage import allocate_kv_caches
from hocket.config.model import ModelConfig
from hocket.dist.mesh import Mesh
from hocket.layers.linear import frozen
from hocket.models.backends import DEFAULT, Backends
from hocket.models.base import CausalLM, UBatchInputs
from hocket.models.loader import load_weights
from hocket.models.registry import build_model
from hocket.moe.base import TokenLayout
from hocket.moe.factory import MoEFactory
from hocket.moe.placement import ExpertPlacement

CPU = torch.device("cpu")


def one_rank_factory(config: ModelConfig, experts_backend: str = "reference", device: torch.device = CPU) -> MoEFactory:
    """All experts on one rank."""
    placement = ExpertPlacement(config.moe.num_experts, 1)
    return MoEFactory(Mesh(rank=0, world_size=1, device=device), placement, "local", experts_backend)


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    experts_backend: str = "reference",
    device: torch.device = CPU,
    backends: Backends = DEFAULT,
) -> CausalLM:
    """The checkpoint in `path` on one rank."""
    config = ModelConfig.from_pretrained(path)
    model = build_model(config, one_rank_factory(config, experts_backend, device), device, dtype, backends)
    load_weights(model, path)
    return model


class PagedRun:
    """A model with a NaN-filled cache and the requests it has seen."""

    def __init__(self, model: CausalLM, block_size: int = 16, num_blocks: int = 64, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self.device = model.embed_tokens.device
        self.caches = allocate_kv_caches(model.config, num_blocks, block_size, model.dtype, self.device)
        for cache in self.caches:
            cache.fill_(float("nan"))
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        self._blocks: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    def spoil_padding(self) -> None:
        """NaN for rows of padding: the embedding of token 0, which no prompt may have. A head that is tied to it keeps
        what it was, else the logit of token 0 would be NaN for all rows."""
        if self.model.lm_head is self.model.embed_tokens:
            self.model.lm_head = frozen(self.model.lm_head.clone())
        self.model.embed_tokens[0] = float("nan")

    def inputs(self, work: Sequence[tuple[str, Sequence[int]]], num_padding: int = 0) -> UBatchInputs:
        """Inputs for one step that computes the given new tokens of each request, padded by rows of token 0."""
        starts, lens, slots, positions, tokens = [0], [], [], [], []
        for name, new in work:
            first = self._computed.get(name, 0)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < first + len(new):
                blocks.append(self._free.pop())
            where = range(first, first + len(new))
            positions += where
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in where]
            tokens += new
            starts.append(starts[-1] + len(new))
            lens.append(first + len(new))
            self._computed[name] = first + len(new)
        num_tokens = len(tokens)
        total = num_tokens + num_padding
        width = max((len(self._blocks[name]) for name, _ in work), default=1)
        table = torch.full((len(work), width + 1), -7, dtype=torch.int32)  # unused entries must not be read
        for row, (name, _) in enumerate(work):
            table[row, : len(self._blocks[name])] = torch.tensor(self._blocks[name], dtype=torch.int32)
        pad = [0] * num_padding
        attention = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            block_table=table.to(self.device),
            block_table_cpu=table,
            slot_mapping=torch.tensor(slots + [-1] * num_padding, dtype=torch.int64, device=self.device),
            query_start_loc_cpu=tuple(starts),
            seq_lens_cpu=tuple(lens),
            max_query_len=max((len(new) for _, new in work), default=0),
            max_seq_len=max(lens, default=0),
            num_tokens=num_tokens,
        )
        return UBatchInputs(
            token_ids=torch.tensor(tokens + pad, dtype=torch.int64, device=self.device),
            positions=torch.tensor(positions + pad, dtype=torch.int64, device=self.device),
            attention=attention,
            layout=TokenLayout.of(num_tokens, total, total, self.device),
        )

    def step(self, work: Sequence[tuple[str, Sequence[int]]], num_padding: int = 0) -> dict[str, Tensor]:
        """Compute the new tokens of each request; fp32 logits [new tokens, V] of each."""
        inputs = self.inputs(work, num_padding)
        logits = self.model.compute_logits(self.model(inputs, self.caches))
        assert logits.dtype == torch.float32
        assert logits.shape[0] == inputs.token_ids.shape[0]
        starts = inputs.attention.query_start_loc_cpu
        return {name: logits[starts[i] : starts[i + 1]] for i, (name, _) in enumerate(work)}

    def greedy(self, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
        """All prompts in one step, then one token of each a step."""
        logits = self.step(list(prompts.items()))
        out: dict[str, list[int]] = {name: [] for name in prompts}
        for _ in range(num_tokens):
            for name in prompts:
                out[name].append(int(logits[name][-1].argmax()))
            logits = self.step([(name, out[name][-1:]) for name in prompts])
        return out
