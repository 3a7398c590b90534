"""Memory of a GPU that the other GPUs of its host write to, and signals between them: PyTorch's symmetric memory, which
is marked as alpha, is used here alone. Knows nothing of what is written.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from hocket.dist.collectives import Group
from hocket.errors import BackendUnavailable, CapacityError


class PeerMemory:
    """`num_bytes` on each rank's GPU, which all ranks of `group` open together.

    of_rank: each rank's memory uint8 [num_bytes], as this rank reads and writes it; its own is local. A copy there is
    made by the GPU's copy engines. What was launched on a stream before `signal` is seen by whatever the other rank
    launches behind its `wait`, both on the current stream. A signal must have been waited for before the next one on
    its channel; who waits for a rank that is gone waits until its process is ended.

    Raises:
        CapacityError: the GPU has no room for it.
    """

    def __init__(self, num_bytes: int, group: Group, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        # Nobody writes to all GPUs at once; setting that up fails on some hosts, and can cost them their GPUs.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        try:
            local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            self._handle = symmetric.rendezvous(local, group)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            free_bytes = torch.cuda.mem_get_info(device)[0]
            raise CapacityError(f"it takes {num_bytes:,} bytes of the GPU, which has {free_bytes:,} left") from error
        shape = (num_bytes,)
        self.of_rank: tuple[Tensor, ...] = tuple(
            local if rank == self._handle.rank else self._handle.get_buffer(rank, shape, torch.uint8)
            for rank in range(self._handle.world_size)
        )

    def signal(self, rank: int, channel: int) -> None:
        """Tell `rank` that what was launched before this is done."""
        self._handle.put_signal(rank, channel)

    def wait(self, rank: int, channel: int) -> None:
        """Go on when `rank` has signalled."""
        self._handle.wait_signal(rank, channel)


def unavailable_reason(device_type: str) -> str | None:
    """Why there is no such memory here; None: there is."""
    if device_type != "cuda":
        return "it runs on NVIDIA GPUs only"
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU"
    has_it = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    return None if has_it else "this PyTorch has no symmetric memory"


def check_peers(name: str, device: torch.device, others: list[str]) -> None:
    """Raise BackendUnavailable where GPUs of this host cannot write to each other's memory: `others` could."""
    if device.type != "cuda":
        return
    for peer in range(torch.cuda.device_count()):
        if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            why = f"GPU {device.index} cannot write to the memory of GPU {peer}"
            raise BackendUnavailable("all2all backend", name, why, others)
