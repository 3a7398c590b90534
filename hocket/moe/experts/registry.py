"""Experts backends by name, imported when asked for. Knows which run here and what stands in where one cannot."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping

import torch

from hocket.config.backends import CPU_EXPERTS
from hocket.errors import BackendUnavailable
from hocket.moe.experts.base import Experts

logger = logging.getLogger(__name__)

AUTO: Mapping[str, tuple[str, ...]] = {
    "cpu": ("grouped_mm", "reference"),
    "cuda": ("triton_grouped", "grouped_mm", "reference"),
}
"""By device: what "auto" takes, the first that can run; also what stands in for another backend that cannot."""


def experts_class(name: str) -> type[Experts]:
    """The class of the backend `name`; BackendUnavailable lists the known names, or says what is missing."""
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
    if name == "triton_grouped":
        from hocket.moe.experts.triton_grouped import TritonGroupedExperts

        _require(name, "triton")
        return TritonGroupedExperts
    if name == "deep_gemm":
        from hocket.moe.experts.deep_gemm import DeepGemmExperts

        _require(name, "triton")
        _require(name, "deep_gemm", "sgl-deep-gemm and apache-tvm-ffi")
        return DeepGemmExperts
    raise BackendUnavailable("experts backend", name, "there is no such backend", CPU_EXPERTS)


def _require(name: str, module: str, package: str = "") -> None:
    """Import `module`, or raise BackendUnavailable with the package to install."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:  # deep_gemm asserts that it finds CUDA
        why = f"it needs {package or module} ({type(error).__name__}: {error})"
        raise BackendUnavailable("experts backend", name, why, CPU_EXPERTS) from error


def suitable_class(
    name: str, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device_type: str = "cpu"
) -> type[Experts]:
    """Like `experts_class`, but the first of the device's `AUTO` that can, with a warning saying why, where `name`
    cannot run these widths.

    "auto": the first of them; then a backend that is not installed is replaced as well, instead of refused.
    """
    order = AUTO[device_type]
    reasons = {}
    for candidate in order if name == "auto" else (name, *order):
        try:
            found = experts_class(candidate)
        except BackendUnavailable as error:
            if candidate == name:
                raise
            reasons[candidate] = str(error)
            continue
        reason = found.unsupported_reason(hidden_size, intermediate_size, dtype)
        if reason is None:
            for replaced, why in reasons.items():
                logger.warning("experts backend %s replaced by %s: %s", replaced, candidate, why)
            return found
        reasons[candidate] = reason
    raise AssertionError("the reference runs everything")
