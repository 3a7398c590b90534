"""Attention backends by name. Knows which exist, not what they promise (`config/backends.py` does)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.attention.backend import AttentionBackend
from hocket.attention.base import AttentionMetadata
from hocket.attention.mla import paged_mla
from hocket.attention.plan import AttentionPlan, plan_attention
from hocket.attention.sdpa import paged_attention
from hocket.config.backends import ATTENTION, CPU_ATTENTION
from hocket.config.model import ModelConfig
from hocket.errors import BackendUnavailable

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


class SdpaAttention(AttentionBackend[AttentionPlan]):
    """PyTorch's scaled_dot_product_attention, for speed: decodes in one call, prefills request by request."""

    name = "sdpa"

    def plan(
        self, meta: AttentionMetadata, num_rows: int, block_size: int, dtype: torch.dtype, slot_bytes: int
    ) -> AttentionPlan:
        return plan_attention(meta, num_rows, block_size, dtype, slot_bytes)

    def grouped_query(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        return paged_attention(query, key, value, cache, plan, scale)

    def latent(
        self,
        query: Tensor,
        latent: Tensor,
        kv_b: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        scale: float,
        is_stored: bool = False,
    ) -> Tensor:
        assert not is_stored
        return paged_mla(query, latent, kv_b, cache, plan, scale)


AUTO = ("flashinfer", "sdpa")
"""What "auto" takes: the first that can run."""


def unavailable_reason(name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the backend `name` cannot run a model of `config` in `dtype` here; None: it can. Compiles nothing.

    Raises:
        BackendUnavailable: there is no such backend. ImportError: what it is made of cannot be imported.
    """
    if name == "flashinfer":
        from hocket.attention.flashinfer_library import HeadShapes, unusable

        return unusable(HeadShapes.of(config), dtype, device)
    attention_backend(name)
    return None


def chosen_name(name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The backend that `name`, also "auto", comes to, unless compiling it fails; BackendUnavailable as
    `attention_backend` raises it."""
    for candidate in AUTO if name == "auto" else (name,):
        reason = unavailable_reason(candidate, config, dtype, device)
        if reason is None:
            return candidate
    raise BackendUnavailable("attention backend", name, str(reason), CPU_ATTENTION)


def attention_backend(
    name: str,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    on_compile: Callable[[int, int], None] = lambda done, total: None,
) -> AttentionBackend[Any]:
    """The backend `name`, for a model of `config` in `dtype`; "auto": flashinfer, else sdpa with a warning that says
    why. on_compile: told how many of how many modules are compiled, where that is to be done.

    Raises:
        BackendUnavailable: there is no such backend, or it cannot run such a model here; says why.
    """
    if name == "sdpa":
        return SdpaAttention()
    if name == "tiled":
        from hocket.attention.tiled import TiledAttention

        return TiledAttention()
    if name not in ("auto", "flashinfer"):
        raise BackendUnavailable("attention backend", name, "there is no such backend", ATTENTION)
    assert config is not None
    found = _flashinfer(config, dtype, device, on_compile)
    if not isinstance(found, str):
        return found
    if name == "flashinfer":
        raise BackendUnavailable("attention backend", name, found, CPU_ATTENTION)
    logger.warning("attention runs with sdpa, which is slow: flashinfer cannot be used: %s", found)
    return SdpaAttention()


def _flashinfer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, on_compile: Callable[[int, int], None]
) -> AttentionBackend[Any] | str:
    """FlashInfer's kernels, compiled; else why they cannot be used."""
    why = unavailable_reason("flashinfer", config, dtype, device)
    if why is not None:
        return why
    from hocket.attention.flashinfer import FlashInferAttention
    from hocket.attention.flashinfer_library import HeadShapes, compile_kernels

    heads = HeadShapes.of(config)
    try:
        compile_kernels(heads, dtype, device, on_compile)
    except (RuntimeError, OSError) as error:
        return f"its kernels cannot be compiled: {error}"
    return FlashInferAttention(heads, device)
