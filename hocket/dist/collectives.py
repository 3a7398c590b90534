"""The torch.distributed collectives that move tokens, called nowhere else. Knows nothing of what the bytes mean.

Every call is blocking in the sense of its backend: on a CPU (gloo) the result is there on return, on a GPU (NCCL) it
is ordered on the current stream. Errors and time-outs of the process group propagate as torch raises them.

gloo has one fast exchange, `all_to_all_single`: gathering through it took 0.5 to 0.7 of the time of gloo's
own gather (2 ranks, 4 to 512 rows of 192).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
"""A process group; None, where it is allowed, stands for all ranks."""


class Mirror:
    """In place of a group: `size` ranks that all do as this one does, so that what it sends to rank i is what comes
    from there. Nothing is started: for looking at what would be sent."""

    def __init__(self, size: int) -> None:
        self.size = size


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group | Mirror | None,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> None:
    """Send the i-th part of `input`'s first dimension to rank i and fill `output` with the parts received.

    Both contiguous, of one dtype and equal trailing shape. Splits count rows per rank and may be zero; without them
    the parts are equal.
    """
    if isinstance(group, Mirror):
        output.copy_(input)
        return
    out_list = None if output_splits is None else list(output_splits)
    in_list = None if input_splits is None else list(input_splits)
    dist.all_to_all_single(output, input, out_list, in_list, group=group)


def all_gather(output: Tensor, input: Tensor, group: Group | Mirror | None) -> None:
    """Fill `output` [n · P, ...] with the `input` [P, ...] of all n ranks in rank order."""
    if input.device.type == "cpu":
        size = group.size if isinstance(group, Mirror) else dist.get_world_size(group)
        all_to_all(output, torch.cat([input] * size), group)
        return
    _renamed("all_gather_single", "all_gather_into_tensor")(output, input, group=group)


def reduce_scatter_sum(output: Tensor, input: Tensor, group: Group | None) -> None:
    """Fill `output` [P, ...] with the sum over all n ranks of this rank's part of their `input` [n · P, ...], taken as
    NCCL does for the dtype."""
    _renamed("reduce_scatter_single", "reduce_scatter_tensor")(output, input, group=group)


def gather_texts(text: str) -> list[str]:
    """The `text` of every rank, in rank order, over the group of all. For start-up: slow."""
    raw = text.encode()
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(raw)]))
    room = max(int(size) for size in sizes) or 1
    gathered = [torch.empty(room, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(gathered, torch.frombuffer(bytearray(raw.ljust(room, b"\0")), dtype=torch.uint8))
    return [bytes(one[: int(size)].tolist()).decode() for one, size in zip(gathered, sizes, strict=True)]


def _renamed(name: str, former: str) -> Callable[..., Any]:
    """torch 2.13 renamed single-tensor collectives and warns at the former name, the only one older versions have."""
    function: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, former)
    return function
