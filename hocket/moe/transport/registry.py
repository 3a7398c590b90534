"""Transports by name, imported when asked for. Knows which exist and why the others do not."""

from __future__ import annotations

from importlib import import_module

import torch

from hocket.dist.collectives import Group
from hocket.errors import BackendUnavailable
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Transport

TRANSPORTS = ("torch", "allgather_reducescatter")
_CLASSES = {
    "local": "hocket.moe.transport.local.LocalTransport",
    "torch": "hocket.moe.transport.torch_a2a.TorchTransport",
    "allgather_reducescatter": "hocket.moe.transport.allgather_reducescatter.AllGatherReduceScatterTransport",
}
REFUSED = {
    "local": "it moves nothing, so it serves one rank only",
    "naive": "it broadcasts rank by rank; allgather_reducescatter does the same in one exchange",
}


def transport_class(name: str) -> type[Transport]:
    """The class of a transport that exists, for what it says of itself."""
    module, _, attribute = _CLASSES[name].rpartition(".")
    found: type[Transport] = getattr(import_module(module), attribute)
    return found


def build_transport(
    name: str, placement: ExpertPlacement, *, rank: int, group: Group | None, device: torch.device
) -> Transport:
    """The transport `name` between the ranks of `group`; where one rank holds all experts, always `local`.

    Raises:
        BackendUnavailable: no such transport here; the message lists those there are.
    """
    if name not in TRANSPORTS and not (name == "local" and placement.num_ranks == 1):
        raise BackendUnavailable("transport", name, REFUSED.get(name, "there is no such transport"), TRANSPORTS)
    if placement.num_ranks == 1:
        from hocket.moe.transport.local import LocalTransport

        return LocalTransport(placement)
    if name == "torch":
        from hocket.moe.transport.torch_a2a import TorchTransport

        return TorchTransport(placement, rank, group, device)
    from hocket.moe.transport.allgather_reducescatter import AllGatherReduceScatterTransport

    return AllGatherReduceScatterTransport(placement, rank, group, device)
