"""Stands in for `moe/transport/peer_memory.py` on CPU ranks: files in memory that all ranks map. For tests only.

What nobody wrote holds NaN, a signal that was not waited for is not given twice, and waiting has a time limit.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.dist.collectives import Group

LIMIT_S = 20.0
NUM_CHANNELS = 16
NAN_BYTE = 0xFF
"""As fp32, bf16 and fp16 all of them are NaN, and as int32 -1."""


def install() -> None:
    """Make transports take it."""
    from hocket.moe.transport import nvlink_copy

    nvlink_copy.PeerMemory = PeerMemory


class PeerMemory:
    """As the real one; of each rank a file of its memory and one of the signals that it gets."""

    def __init__(self, num_bytes: int, group: Group, device: torch.device) -> None:
        self._rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        names = [tempfile.mkdtemp(dir="/dev/shm", prefix="peers-")]
        dist.broadcast_object_list(names, src=0, group=group)
        folder = Path(names[0])
        sizes = num_bytes, 4 * num_ranks * NUM_CHANNELS
        for part, size, fill in zip(("memory", "signals"), sizes, (NAN_BYTE, 0), strict=True):
            (folder / f"{part}{self._rank}").write_bytes(bytes([fill]) * size)
        dist.barrier(group)
        self.of_rank = tuple(_mapped(folder / f"memory{i}", num_bytes, torch.uint8) for i in range(num_ranks))
        self._signals = tuple(
            _mapped(folder / f"signals{i}", num_ranks * NUM_CHANNELS, torch.int32).view(num_ranks, NUM_CHANNELS)
            for i in range(num_ranks)
        )
        dist.barrier(group)
        for part in ("memory", "signals"):
            os.unlink(folder / f"{part}{self._rank}")

    def signal(self, rank: int, channel: int) -> None:
        self._change(self._signals[rank][self._rank], channel, 0, 1, f"rank {rank} did not wait for")

    def wait(self, rank: int, channel: int) -> None:
        self._change(self._signals[self._rank][rank], channel, 1, 0, f"rank {rank} did not send")

    @staticmethod
    def _change(signals: Tensor, channel: int, before: int, after: int, what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while signals[channel] != before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} signal {channel}")
            time.sleep(0)
        signals[channel] = after


def _mapped(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)
