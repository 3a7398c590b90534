"""Fills a model's weights, from a checkpoint (strictly) or at random. Knows nothing of any particular model."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hocket.config.model import ModelConfig
from hocket.errors import CheckpointError
from hocket.models.accounting import Read, match
from hocket.models.base import CausalLM
from hocket.models.checkpoint import Checkpoint
from hocket.models.filling import Filler
from hocket.models.weights import WeightSpec
from hocket.quant import fp8

logger = logging.getLogger(__name__)
FP8_BLOCK = (128, 128)
PROGRESS_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading took. num_tensors: read by this rank; bytes_read: from files, headers not counted."""

    num_tensors: int
    bytes_read: int
    seconds: float


def load_weights(
    model: CausalLM, directory: str | Path, *, on_progress: Callable[[int, int], None] | None = None
) -> LoadReport:
    """Fill every weight of `model` from the safetensors files in `directory`, converted to the model's dtypes.

    Experts of other ranks are not read. `on_progress(done, total)` counts bytes and is called at most some hundred
    times. Block-scaled fp8 weights are read as they are where the model holds them so, else expanded, with a warning in
    the log if the model holds none in fp8.

    Raises:
        CheckpointError: anything missing, left over, in two places, misshapen or unreadable, in one line.
    """
    started = time.perf_counter()
    specs = list(model.weight_specs())
    with Checkpoint(directory) as checkpoint:
        reads = match(specs, checkpoint, model.config)
        num_expanded = sum(read.scale is not None and read.scale_target is None for read in reads)
        if num_expanded:
            level = logging.INFO if model.fp8_reason is None else logging.WARNING
            why = model.fp8_reason or "their widths or their use do not allow fp8"
            logger.log(level, "%d fp8 tensors are expanded to %s: %s", num_expanded, model.dtype, why)
        filled = [read for read in reads if read.equal_to is None]
        bytes_read = _fill_all(filled, checkpoint, model, on_progress)
        for read in reads:
            if read.equal_to is not None:
                bytes_read += _compare(read, checkpoint)
    return LoadReport(num_tensors=len(reads), bytes_read=bytes_read, seconds=time.perf_counter() - started)


def _fill_all(
    reads: Sequence[Read], checkpoint: Checkpoint, model: CausalLM, on_progress: Callable[[int, int], None] | None
) -> int:
    """In the order of the files; returns the number of bytes."""
    spans = [(checkpoint.span(read.name, read.expert, read.rows), read) for read in reads]
    spans.sort(key=lambda pair: (pair[0].file, pair[0].offset))
    total = sum(span.num_bytes + _scale_bytes(read, checkpoint) for span, read in spans)
    filler = Filler(model.embed_tokens.device)
    jobs = [partial(_fill, read, checkpoint, model.config, filler) for _, read in spans]
    done = reported = 0
    for (span, read), _ in zip(spans, filler.run(jobs), strict=True):
        done += span.num_bytes + _scale_bytes(read, checkpoint)
        if on_progress is not None and (done - reported) * PROGRESS_STEPS >= total:
            on_progress(done, total)
            reported = done
    if on_progress is not None and reported < total:
        on_progress(total, total)
    return total


def _scale_bytes(read: Read, checkpoint: Checkpoint) -> int:
    return 0 if read.scale is None else checkpoint.span(read.scale, read.expert, read.scale_rows).num_bytes


def _fill(read: Read, checkpoint: Checkpoint, config: ModelConfig, filler: Filler) -> None:
    if read.scale is None or read.scale_target is not None:
        with checkpoint.naming(read.name):
            filler.fill(read.target, checkpoint.span(read.name, read.expert, read.rows))
    if read.scale is None:
        return
    if read.scale_target is not None:
        with checkpoint.naming(read.scale):
            filler.fill(read.scale_target, checkpoint.span(read.scale, read.expert, read.scale_rows))
        return
    value = checkpoint.read(read.name, read.expert, read.rows).to(read.target.device)
    scale = checkpoint.read(read.scale, read.expert).to(read.target.device)
    block = config.quantization.block if config.quantization else FP8_BLOCK
    first_row = read.rows[0] if read.rows else 0
    read.target.copy_(expand_fp8(value, scale, block, first_row, f"{checkpoint.directory}: {read.scale}"))


def _compare(read: Read, checkpoint: Checkpoint) -> int:
    """What is read must equal the target, which something else has filled; returns the number of bytes."""
    value = checkpoint.read(read.name, read.expert, read.rows)
    if not torch.equal(value.to(read.target), read.target):
        raise CheckpointError(
            f"{checkpoint.directory}: {read.name} differs from {read.equal_to}, but config.json ties them "
            "(tie_word_embeddings)"
        )
    return value.nbytes


def expand_fp8(value: Tensor, scale: Tensor, block: tuple[int, int], first_row: int, what: str) -> Tensor:
    """fp32 [rows, columns] of a block-scaled fp8 matrix.

    value: rows [first_row, first_row + rows) of the matrix; scale [row blocks, column blocks] multiplies each block.

    Raises:
        CheckpointError: `scale` (called `what`) has too few blocks.
    """
    rows, columns = value.shape
    device = value.device
    row_blocks = torch.arange(first_row, first_row + rows, device=device).div(block[0], rounding_mode="floor")
    column_blocks = torch.arange(columns, device=device).div(block[1], rounding_mode="floor")
    needed = ((first_row + rows - 1) // block[0] + 1, (columns - 1) // block[1] + 1)
    if scale.dim() != 2 or scale.shape[0] < needed[0] or scale.shape[1] != needed[1]:
        raise CheckpointError(f"{what} is {list(scale.shape)}, at least {list(needed)} blocks are needed")
    return value.float() * scale.float()[row_blocks][:, column_blocks]


def dummy_weights(model: CausalLM, seed: int = 0) -> LoadReport:
    """Random weights: each tensor depends on its published name and `seed` alone, so ranks and EP sizes agree.

    Matrices have standard deviation 1 / sqrt(columns), norms are 1, biases small. (CPU and GPU draw differently.)
    What is held in fp8 is drawn alike and then quantised.
    """
    started = time.perf_counter()
    generators: dict[torch.device, torch.Generator] = {}
    count = 0
    for spec in model.weight_specs():
        if spec.target is None:
            continue
        device = spec.target.device
        generator = generators.setdefault(device, torch.Generator(device))
        digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "big"))
        value = _draw(spec, generator)
        if spec.scale is not None:
            value, scale = fp8.quantize_blocks(value)
            spec.scale.copy_(scale)
        spec.target.copy_(value)
        count += 1
    return LoadReport(num_tensors=count, bytes_read=0, seconds=time.perf_counter() - started)


def _draw(spec: WeightSpec, generator: torch.Generator) -> Tensor:
    device = generator.device
    if "norm" in spec.name:
        return torch.ones(spec.shape, device=device)
    value = torch.randn(spec.shape, generator=generator, device=device)
    return value * (0.01 if len(spec.shape) == 1 else spec.shape[1] ** -0.5)
