"""Other shapes of a model for benchmarks: fewer layers, or what one GPU of a larger deployment holds. Runs nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hocket.bench.floor import BYTES, FP8_BYTES, SCALE_BYTES
from hocket.config.model import ModelConfig, read_json
from hocket.config.options import Options
from hocket.config.resolve import model_folder
from hocket.errors import ConfigError

FP8_BLOCK = 128
"""Elements of a row in fp8 that share a scale."""
PUBLISHED = {("deepseek_v3", 7168): "DeepSeek-V3"}
"""By type and hidden size."""
EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one GPU of an EP-N deployment does, on R ranks. E experts of the model, K of them for each token.

    A GPU of EP-N holds E / N experts, and of the tokens of N GPUs, t each, N · t · K / E come to each of them. Here R
    ranks hold E / N experts each and choose K of these R · E / N: R · t · K / (R · E / N) rows for each, the same. A
    token has K / R of its experts on each rank, so fewer copies travel than at EP-N, and transports may send one copy
    for several experts of a rank: communication is EP-N's only over an emulated link that counts it (`token_bytes`).
    """

    of_ep: int
    model_experts: int
    experts_per_rank: int
    rows_per_expert_and_token: float
    """Rows of each expert for one token per GPU: N · K / E."""

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def changed(
    options: Options, slice_of_ep: int | None, num_layers: int | None, num_dense_layers: int | None = None
) -> Iterator[tuple[Options, Slice | None]]:
    """`options` with a model of the changed shape, in a temporary folder that holds a config.json and nothing else.

    Raises:
        ConfigError: weights are not dummies, or the model cannot be sliced so.
    """
    asked = {"slice_of_ep": slice_of_ep, "num_layers": num_layers, "num_dense_layers": num_dense_layers}
    given = {field: value for field, value in asked.items() if value is not None}
    if not given:
        yield options, None
        return
    if options.load_format != "dummy":
        raise ConfigError(*next(iter(given.items())), "nothing without dummy weights")
    hf = read_json(model_folder(options.model) / "config.json")
    found = None
    if num_layers is not None:
        hf = _with(hf, num_hidden_layers=num_layers)
    if num_dense_layers is not None:
        if "first_k_dense_replace" not in _inner(hf):
            allowed = "nothing for a model whose config.json has no first_k_dense_replace"
            raise ConfigError("num_dense_layers", num_dense_layers, allowed)
        hf = _with(hf, first_k_dense_replace=num_dense_layers)
    if slice_of_ep is not None:
        hf, found = sliced(hf, slice_of_ep, options.data_parallel_size)
    with tempfile.TemporaryDirectory(prefix="hocket-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf), encoding="utf-8")
        yield replace(options, model=folder, skip_tokenizer_init=True), found


def sliced(hf: Mapping[str, Any], of_ep: int, num_ranks: int) -> tuple[dict[str, Any], Slice]:
    """A config.json of which `num_ranks` ranks together hold as many experts per rank as GPUs of EP-`of_ep` do.

    Groups of experts stay where a token still finds its experts in them, else there is one group.
    """
    model = ModelConfig.from_dict(hf)
    moe = model.moe
    if of_ep < num_ranks or moe.num_experts % of_ep:
        allowed = f"a divisor of the model's {moe.num_experts} experts, at least the number of ranks ({num_ranks})"
        raise ConfigError("slice_of_ep", of_ep, allowed)
    per_rank = moe.num_experts // of_ep
    kept = per_rank * num_ranks
    if kept < moe.top_k:
        allowed = f"at most {moe.num_experts * num_ranks // moe.top_k}: a token needs {moe.top_k} experts"
        raise ConfigError("slice_of_ep", of_ep, allowed)
    changes: dict[str, Any] = {key: kept for key in EXPERT_KEYS if key in _inner(hf)}
    if kept % moe.num_groups or kept // moe.num_groups * moe.topk_groups < moe.top_k:
        changes |= {"n_group": 1, "topk_group": 1}
    found = Slice(
        of_ep=of_ep,
        model_experts=moe.num_experts,
        experts_per_rank=per_rank,
        rows_per_expert_and_token=of_ep * moe.top_k / moe.num_experts,
    )
    return _with(hf, **changes), found


def token_bytes(model: ModelConfig, num_ranks: int, dtype: str, *, is_fp8: bool) -> tuple[float, float]:
    """Bytes of one token's dispatch and of its combine as between the GPUs of a large EP: K copies, one for each of its
    experts, of which those for other ranks than its own travel, K · (R - 1) / R of them.

    is_fp8: dispatched rows have a byte per element and an fp32 scale for every FP8_BLOCK of them. Combined rows are of
    `dtype`.
    """
    copies = model.moe.top_k * (num_ranks - 1) / num_ranks
    row = float(model.hidden_size * BYTES[dtype])
    fp8_row = model.hidden_size * FP8_BYTES + -(-model.hidden_size // FP8_BLOCK) * SCALE_BYTES
    return copies * (fp8_row if is_fp8 else row), copies * row


def published_name(model: ModelConfig, folder: str) -> str:
    """What a slice's model is called: as its publisher calls it, where the shape is known, else by its folder."""
    return PUBLISHED.get((model.model_type, model.hidden_size), Path(folder).name)


def _inner(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the language model's values are: nested in a multi-modal configuration."""
    nested = hf.get("text_config")
    return nested if "num_hidden_layers" not in hf and isinstance(nested, Mapping) else hf


def _with(hf: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    if _inner(hf) is hf:
        return {**hf, **changes}
    return {**hf, "text_config": {**_inner(hf), **changes}}
