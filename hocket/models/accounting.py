"""Matches what a model expects with what a checkpoint has, strictly. Knows names and shapes only; reads nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hocket.config.model import ModelConfig
from hocket.errors import CheckpointError
from hocket.models.checkpoint import Checkpoint, listed
from hocket.models.weights import FusedSource, WeightSpec
from hocket.quant import fp8

FP8 = "F8_E4M3"
READABLE = ("F64", "F32", "BF16", "F16")
_FIRST_PARTS = re.compile(r"(?P<prefix>.*?)(layers\.\d+\..*|embed_tokens\.weight)")


@dataclass(frozen=True, kw_only=True)
class Read:
    """One thing to read: `name` (of a stacked tensor entry `expert`, `rows`) into `target`, times `scale` if fp8.

    scale_target, scale_rows: where the scales go instead if the target is fp8 as well, and which of a stacked entry's.
    equal_to: the target's own content is left alone and must equal what is read.
    """

    name: str
    target: Tensor
    expert: int | None = None
    rows: tuple[int, int] | None = None
    scale: str | None = None
    scale_target: Tensor | None = None
    scale_rows: tuple[int, int] | None = None
    equal_to: str | None = None


class Naming:
    """How the checkpoint spells names: it may nest the language model (`model.language_model.layers…`)."""

    def __init__(self, expected: Collection[str], existing: Collection[str]) -> None:
        inner = {name.removeprefix("model.") for name in expected if name.startswith("model.")}
        matches = (_FIRST_PARTS.fullmatch(name) for name in existing)
        prefixes = sorted({match["prefix"] for match in matches if match})
        known = set(existing)
        self.prefix = max(prefixes, key=lambda p: sum(p + name in known for name in inner), default="model.")
        heads = [name for name in existing if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
        self.head = min(heads, key=len, default="lm_head.weight")

    def __call__(self, name: str) -> str:
        """The checkpoint's spelling of the published name `name`."""
        if name == "lm_head.weight":
            return self.head
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name


def match(specs: Sequence[WeightSpec], checkpoint: Checkpoint, config: ModelConfig) -> list[Read]:
    """What to read, in the order of `specs`, equality checks last.

    Raises:
        CheckpointError: tensors missing, not part of the model, or of another shape or dtype; all of them counted.
    """
    existing = checkpoint.shapes
    published = {s.name for s in specs} | {s.fused.name for s in specs if s.fused}
    naming = Naming(published, existing)
    targets = {spec.name: spec.target for spec in specs}
    reads: list[Read] = []
    used: set[str] = set()
    missing: list[str] = []
    wrong: dict[str, None] = {}
    for spec in specs:
        name, shape, fused = naming(spec.name), spec.shape, None
        if name not in existing and spec.fused is not None and naming(spec.fused.name) in existing:
            fused = spec.fused
            name, shape = naming(fused.name), fused.shape
        if name not in existing:
            if spec.equal_to is None:
                missing.append(name)
            continue
        used.add(name)
        scale = _scale_of(name, checkpoint, used)
        if existing[name] != shape:
            wrong[f"{name} is {list(existing[name])} instead of {list(shape)}"] = None
        elif checkpoint.dtypes[name] not in READABLE and scale is None:
            wrong[f"{name} has dtype {checkpoint.dtypes[name]} and no scale"] = None
        elif spec.scale is not None and (problem := _unlike_fp8(name, scale, shape, checkpoint)):
            wrong[problem] = None
        target = spec.target if spec.equal_to is None else targets[spec.equal_to]
        if target is not None:
            read = Read(name=name, target=target, scale=scale, scale_target=spec.scale, equal_to=spec.equal_to)
            reads.append(read if fused is None else _of_stacked(read, fused))
    unused = [name for name in existing if name not in used and not _is_ignored(name, naming.prefix, config)]
    _report(checkpoint, missing, unused, list(wrong))
    return sorted(reads, key=lambda read: read.equal_to is not None)


def _of_stacked(read: Read, fused: FusedSource) -> Read:
    first, end = fused.rows
    rows = None if read.scale_target is None else (first // fp8.BLOCK, fp8.blocks(end))
    return replace(read, expert=fused.expert, rows=fused.rows, scale_rows=rows)


def _unlike_fp8(name: str, scale: str | None, shape: tuple[int, ...], checkpoint: Checkpoint) -> str | None:
    """What keeps a tensor from being held as the fp8 that config.json says it is."""
    if scale is None:
        where = "modules_to_not_convert of config.json does not name it"
        return f"{name} has dtype {checkpoint.dtypes[name]} instead of {FP8}, and {where}"
    found, wanted = checkpoint.shapes[scale], (*shape[:-2], fp8.blocks(shape[-2]), fp8.blocks(shape[-1]))
    if checkpoint.dtypes[scale] not in READABLE:
        return f"{scale} has dtype {checkpoint.dtypes[scale]}"
    return None if found == wanted else f"{scale} is {list(found)} instead of {list(wanted)}"


def _scale_of(name: str, checkpoint: Checkpoint, used: set[str]) -> str | None:
    """The name of an fp8 tensor's scales, marked as used."""
    scale = f"{name}_scale_inv"
    if checkpoint.dtypes[name] != FP8 or scale not in checkpoint.shapes:
        return None
    used.add(scale)
    return scale


def _is_ignored(name: str, prefix: str, config: ModelConfig) -> bool:
    """Rotary tables, which are computed, and DeepSeek-V3's layers for predicting further tokens."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    layer = re.match(re.escape(prefix) + r"layers\.(\d+)\.", name)
    extra = range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    return layer is not None and int(layer[1]) in extra


def _report(checkpoint: Checkpoint, missing: list[str], unused: list[str], wrong: list[str]) -> None:
    problems = []
    if missing:
        text = f"{len(missing)} missing: {listed(missing)}"
        near = difflib.get_close_matches(missing[0], (unused or list(checkpoint.shapes))[:2000], n=1, cutoff=0.5)
        problems.append(text + (f" (nearest name there: {near[0]})" if near else ""))
    if unused:
        problems.append(f"{len(unused)} not part of the model: {listed(unused)}")
    if wrong:
        problems.append(f"{len(wrong)} unfit: {listed(wrong)}")
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: tensors do not match config.json: " + "; ".join(problems))
