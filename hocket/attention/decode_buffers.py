"""What a captured decode reads of its requests, on the device, and the host's memory that it is copied from.

Knows no kernels. Legend: R requests, of one new token each.
"""

from __future__ import annotations

import numpy as np
import torch

from hocket.attention.base import AttentionMetadata
from hocket.attention.paging import pages


class Fence:
    """Says when the copies that the device's current stream got before `set` have been made."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        if self._event is not None:
            self._event.record()

    @property
    def is_open(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class DecodeBuffers:
    """`host` and `device` hold the same names: int32 rows [R + 1] (0 … R), indptr [R + 1], indices [R · most blocks],
    lens [R]; int64 slots [R]. `fence` says when `host` may be written again.
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        sizes = {"rows": num_rows + 1, "indptr": num_rows + 1, "indices": num_rows * max_blocks, "lens": num_rows}
        pinned = device.type == "cuda"
        self.host = {name: torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for name, size in sizes.items()}
        self.host["slots"] = torch.zeros(num_rows, dtype=torch.int64, pin_memory=pinned)
        self.host["rows"].copy_(torch.arange(num_rows + 1))
        self.device = {name: torch.zeros_like(x, device=device) for name, x in self.host.items()}
        self.fence = Fence(device)

    def fill(self, meta: AttentionMetadata, block_size: int, *, whole_contexts: bool) -> int:
        """Write the host's side, and the device's slots; returns how many indices there are.

        whole_contexts: `lens` counts all tokens of a context, not only those in its last block.
        """
        host = self.host
        num_rows = len(host["lens"])
        assert len(meta.seq_lens_cpu) == num_rows, "a captured plan has a fixed number of requests"
        self.fence.wait()
        lens = np.fromiter(meta.seq_lens_cpu, dtype=np.int32, count=num_rows)
        found = pages(meta.block_table_cpu.numpy(), lens, block_size)
        num_indices = len(found.indices)
        host["indptr"].numpy()[:] = found.indptr
        host["indices"].numpy()[:num_indices] = found.indices
        host["lens"].numpy()[:] = lens if whole_contexts else found.last
        slots = meta.slot_mapping[:num_rows]
        if slots.device.type == "cpu":  # the caller's memory may be written again before the copy is made
            slots = host["slots"].copy_(slots)
        self.device["slots"].copy_(slots, non_blocking=True)
        return num_indices

    def send(self, name: str, count: int | None = None) -> None:
        """Queue the copy of the first `count` entries (None: of all) to the device."""
        self.device[name][:count].copy_(self.host[name][:count], non_blocking=True)
