"""Experts backends by name, imported when asked for. Knows which run here and what stands in where one cannot."""

from __future__ import annotations

import logging

import torch

from hocket.config.backends import EXPERTS
from hocket.errors import BackendUnavailable
from hocket.moe.experts.base import Experts

logger = logging.getLogger(__name__)


def experts_class(name: str) -> type[Experts]:
    """The class of the backend `name`; BackendUnavailable lists the known names."""
    if name == "reference":
        from hocket.moe.experts.reference import ReferenceExperts

        return ReferenceExperts
    if name == "grouped_mm":
        from hocket.moe.experts.grouped_mm import GroupedMMExperts

        if not hasattr(torch.nn.functional, "grouped_mm"):
            why = f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
            raise BackendUnavailable("experts backend", name, why, ("reference",))
        return GroupedMMExperts
    if name == "tiled":
        from hocket.moe.experts.tiled import TiledExperts

        return TiledExperts
    raise BackendUnavailable("experts backend", name, "there is no such backend", EXPERTS)


def suitable_class(name: str, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> type[Experts]:
    """Like `experts_class`, but the reference, with a warning saying why, where `name` cannot run these widths.

    "auto": the fastest that runs here; then a backend that torch lacks is replaced as well, instead of refused.
    """
    try:
        wanted = experts_class("grouped_mm" if name == "auto" else name)
    except BackendUnavailable as error:
        if name != "auto":
            raise
        logger.warning("experts backend reference is used: %s", error)
        return experts_class("reference")
    reason = wanted.unsupported_reason(hidden_size, intermediate_size, dtype)
    if reason is None:
        return wanted
    logger.warning("experts backend %s replaced by reference: %s", wanted.name, reason)
    return experts_class("reference")
