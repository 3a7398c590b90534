"""Transports by name, imported when asked for. Knows which exist and why the others do not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from hocket.config.backends import EP_TRANSPORTS
from hocket.dist.collectives import Group
from hocket.errors import BackendUnavailable
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Transport

TRANSPORTS = EP_TRANSPORTS
_CLASSES = {
    "local": "hocket.moe.transport.local.LocalTransport",
    "torch": "hocket.moe.transport.torch_a2a.TorchTransport",
    "allgather_reducescatter": "hocket.moe.transport.allgather_reducescatter.AllGatherReduceScatterTransport",
    "nvlink_copy": "hocket.moe.transport.nvlink_copy.NVLinkCopyTransport",
    "deepep_high_throughput": "hocket.moe.transport.deepep_high_throughput.DeepEPHighThroughput",
    "deepep_low_latency": "hocket.moe.transport.deepep_low_latency.DeepEPLowLatency",
}
REFUSED = {
    "local": "it moves nothing, so it serves one rank only",
    "naive": "it broadcasts rank by rank; allgather_reducescatter does the same in one exchange",
}


def transport_class(name: str) -> Any:
    """The class of a transport that exists; those between ranks are made of (placement, rank, group, device)."""
    module, _, attribute = _CLASSES[name].rpartition(".")
    return getattr(import_module(module), attribute)


def traits(name: str) -> dict[str, Any]:
    """What the transport `name` states of itself: {max_sms, is_apart, launch_blocks, captures}, see `Transport`."""
    kind = transport_class(name)
    return {key: getattr(kind, key) for key in ("max_sms", "is_apart", "launch_blocks", "captures")}


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
        found: Transport = transport_class("local")(placement)
    else:
        found = transport_class(name)(placement, rank, group, device)
    return found
