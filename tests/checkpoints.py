"""Tiny random checkpoints on disk, written by transformers, and transformers' own answers to them.

Plain random weights hide faults (a lost expert changes no token), so matrices are scaled up, norms perturbed and the
correction bias drawn at random; `Reference.prompts` picks prompts whose routing and greedy tokens are not near a tie.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

VOCAB = 512
LAYOUTS = ("published", "fused", "sharded", "fused-sharded", "old-config")
"""published: experts one by one, one file. fused: experts stacked. old-config: rope_theta and rope_scaling."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "eos_token_id": 2,
    "bos_token_id": None,
}
_MLA: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
_V2: dict[str, Any] = {"model_type": "deepseek_v2", **_MLA, "q_lora_rank": None, "topk_method": "greedy"}
_V2_GROUPS: dict[str, Any] = {
    **_V2,
    "q_lora_rank": 24,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    **_MLA,
    "q_lora_rank": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **_COMMON,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
_PUBLISHED_HEADS: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
"""Widths that kernels for GPUs are made for."""
_PUBLISHED_MLA: dict[str, Any] = {
    **_PUBLISHED_HEADS,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _yarn(**values: float) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    return {"rope_parameters": {**rope, "beta_fast": 32, "beta_slow": 1, **values}}


CONFIGS: dict[str, dict[str, Any]] = {
    "v2": _V2,
    "v2-tied": {**_V2, "tie_word_embeddings": True},
    "v2-groups": _V2_GROUPS,
    "v2-yarn": {**_V2, **_yarn(mscale=1.0, mscale_all_dim=0.707)},
    "v2-yarn-plain": {**_V2_GROUPS, **_yarn()},
    "v2-linear": {**_V2, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "v2-bias": {**_V2, "attention_bias": True},
    "v3": _V3,
    "v3-tied": {**_V3, "tie_word_embeddings": True},
    "v3-yarn": {**_V3, **_yarn(mscale=1.0, mscale_all_dim=1.0)},
    "v3-halves": {**_V3, "rope_interleave": False, "attention_bias": True},
    "v3-no-groups": {**_V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "qwen3": _QWEN,
    "qwen3-no-norm": {**_QWEN, "norm_topk_prob": False, "tie_word_embeddings": True},
    "qwen3-yarn": {**_QWEN, **_yarn(), "attention_bias": True},
    "qwen3-dense-layer": {**_QWEN, "mlp_only_layers": [2], "num_experts": 7},
}
GPU_CONFIGS: dict[str, dict[str, Any]] = {
    "v2-heads": {**_V2, **_PUBLISHED_MLA, **_yarn(mscale=0.707, mscale_all_dim=0.707)},
    "v3-heads": {**_V3, **_PUBLISHED_MLA},
    "qwen3-heads": {**_QWEN, **_PUBLISHED_HEADS, "head_dim": 128},
}
"""Models that the fast kernels take."""


def make(name: str, root: Path, layout: str = "published", dtype: torch.dtype = torch.float32) -> Path:
    """The folder of checkpoint `name` (a key of CONFIGS) under `root`, written on the first call."""
    path = Path(root) / f"{name}-{layout}-{str(dtype).removeprefix('torch.')}"
    if (path / "config.json").exists():
        return path
    model = _random_model(name).to(dtype)
    if layout not in LAYOUTS:
        raise KeyError(layout)
    model.save_pretrained(
        path,
        max_shard_size="200KB" if layout.endswith("sharded") else "1GB",
        save_original_format=not layout.startswith("fused"),
    )
    if layout == "old-config":
        _use_old_config(path / "config.json")
    return path


def _random_model(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(sum(map(ord, name)))
    values = dict((CONFIGS | GPU_CONFIGS)[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key:
                continue
            if key.endswith(("e_score_correction_bias", ".bias")):
                value.normal_(std=0.15)
            elif "norm" in key:
                value.add_(torch.randn_like(value), alpha=0.2)
            else:
                value.mul_(8 if key.endswith("gate.weight") else 5)
    return model.eval()


def _use_old_config(path: Path) -> None:
    """Spell the rotary settings as published checkpoints do."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope_type = rope.pop("rope_type")
    config["rope_scaling"] = None if rope_type == "default" else {**rope, "type": rope_type}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


class Reference:
    """transformers' model in fp32 and its answers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.config = self.model.config
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """fp32 [T, V]."""
        key = tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = self._forward(key)
        return self._logits[key]

    @torch.no_grad()
    def _forward(self, token_ids: Sequence[int]) -> Tensor:
        out: Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return out

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` greedy tokens (no end-of-sequence check)."""
        found = self._greedy.setdefault(tuple(token_ids), [])
        new, cache = [*token_ids, *found], self._cache()
        while len(found) < num_tokens:
            out = self.model(torch.tensor([new]), use_cache=True, logits_to_keep=1, **cache)
            new = [int(out.logits[0, -1].argmax())]
            found += new
        return found[:num_tokens]

    @torch.no_grad()
    def _find_greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """What `greedy` then knows of these prompts: found together, it takes a fifth of the time."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        seen = torch.arange(ids.shape[1]) < lengths[:, None]
        cache = self._cache()
        logits = self.model(ids, use_cache=True, **cache).logits  # what is padded stands behind what a token sees
        new = [logits[torch.arange(len(ids)), lengths - 1].argmax(-1)]
        for position in range(num_tokens - 1):
            seen = nn.functional.pad(seen, (0, 1), value=True)
            place = {"attention_mask": seen.long(), "position_ids": (lengths + position)[:, None]}
            logits = self.model(new[-1][:, None], use_cache=True, **place, **cache).logits
            new.append(logits[:, -1].argmax(-1))
        self._greedy |= zip(map(tuple, prompts), torch.stack(new, 1).tolist(), strict=True)

    def _cache(self) -> dict[str, Any]:
        """An empty one. The keyword was renamed within the range of versions that are supported."""
        from transformers import DynamicCache

        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        return {name: DynamicCache(config=self.config)}

    def margin(self, token_ids: Sequence[int], num_prompt_tokens: int) -> float:
        """How near the nearest tie is: of expert or group choices anywhere, of greedy tokens after the prompt."""
        with self._choices() as margins:
            logits = self._forward(token_ids)
        self._logits[tuple(token_ids)] = logits
        greedy = _gaps(logits[num_prompt_tokens - 1 : -1], 1)
        return min(float(found.min()) for found in (*margins, greedy) if found.numel())

    @torch.no_grad()
    def continue_all(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy tokens int64 [N, num_tokens] of N prompts of one length, their log-probabilities [N, num_tokens, V],
        and each one's margin [N], see `margin`."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        for count in range(num_tokens):
            with self._choices() as margins:
                logits = self.model(ids, use_cache=False, logits_to_keep=count + 1).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
        nearest = [found.reshape(len(ids), -1).amin(1) for found in (*margins, _gaps(logits, 1))]
        return ids[:, -num_tokens:], logits.log_softmax(-1), torch.stack(nearest).amin(0)

    def prompts(self, lengths: list[int], num_tokens: int, seed: int = 0, least: float = 1e-5) -> list[list[int]]:
        """Random prompts of these lengths whose margins over `num_tokens` greedy tokens exceed `least`."""
        generator = torch.Generator().manual_seed(seed)
        found: list[list[int]] = []
        for _ in range(50):
            drawn = []
            for length in lengths[len(found) :]:
                ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
                drawn.append((ids, generator.get_state()))
            if not drawn:
                return found
            self._find_greedy([ids for ids, _ in drawn], num_tokens)
            for ids, drawn_so_far in drawn:
                if self.margin(ids + self.greedy(ids, num_tokens), len(ids)) <= least:
                    generator.set_state(drawn_so_far)  # those behind it are drawn anew
                    break
                found.append(ids)
        raise AssertionError(f"no prompt of length {lengths[len(found)]} with margin {least}")

    @contextmanager
    def _choices(self) -> Iterator[list[Tensor]]:
        """Collects the margins of each router call made inside, one per row."""
        margins: list[Tensor] = []
        handles = []
        for module in self.model.modules():
            if type(module).__name__.endswith("Router"):
                handles.append(module.register_forward_hook(self._hook(margins)))
        try:
            yield margins
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, margins: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
        config = self.config

        def hook(router: nn.Module, _: Any, output: Any) -> None:
            logits = output[0].float()
            is_v3 = config.model_type == "deepseek_v3"
            scores = logits.sigmoid() + router.e_score_correction_bias if is_v3 else logits.softmax(-1)
            if is_v3 or getattr(config, "topk_method", "") == "group_limited_greedy":
                grouped = scores.unflatten(-1, (config.n_group, -1))
                of_group = grouped.topk(2).values.sum(-1) if is_v3 else grouped.amax(-1)
                if config.topk_group < config.n_group:
                    margins.append(_gaps(of_group, config.topk_group))
                chosen = of_group.topk(config.topk_group).indices
                keep = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, chosen, True)
                scores = grouped.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
            margins.append(_gaps(scores, config.num_experts_per_tok))

        return hook


def _gaps(scores: Tensor, count: int) -> Tensor:
    """Each row's distance between the last chosen of `count` and the first not chosen."""
    best = scores.topk(count + 1).values
    return best[..., count - 1] - best[..., count]


@functools.cache
def hf_reference(path: Path) -> Reference:
    """The reference of the checkpoint in `path`, loaded once."""
    return Reference(path)
