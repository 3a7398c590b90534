"""Ranks and groups as a value. Knows nothing of how processes are started or joined."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hocket.dist.record import Record


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this rank stands.

    rank, world_size: among all data-parallel ranks. node_ranks: the ranks on this host, the lowest first (it leads).
    ep_group: the process group of the experts' all-to-all, None where each rank has all experts.
    record: where this rank says how far it is.
    """

    rank: int
    world_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    node_ranks: tuple[int, ...] = (0,)
    ep_group: dist.ProcessGroup | None = None
    record: Record = field(default_factory=Record)

    @property
    def ep_size(self) -> int:
        return self.world_size if self.ep_group is not None else 1

    @property
    def ep_rank(self) -> int:
        return self.rank if self.ep_group is not None else 0
