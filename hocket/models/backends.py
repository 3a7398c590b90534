"""What a model computes with: kernels and an attention backend, and a check that they keep their promise here.

Knows no model: it walks over modules and matrices.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hocket import envs
from hocket.attention.backend import AttentionBackend
from hocket.attention.registry import CPU, SdpaAttention, attention_backend
from hocket.config.model import ModelConfig
from hocket.errors import BackendUnavailable
from hocket.layers.kernels import MAX_ROWS, PLAIN, Kernels, TiledKernels, rows_are_alike
from hocket.layers.linear import Linear


@dataclass(frozen=True, kw_only=True)
class Backends:
    """One model's; the default is the fastest."""

    kernels: Kernels = PLAIN
    attention: AttentionBackend[Any] = field(default_factory=SdpaAttention)


DEFAULT = Backends()
logger = logging.getLogger(__name__)


def backends_for(
    attention: str,
    deterministic: bool,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    on_compile: Callable[[int, int], None] = lambda done, total: None,
) -> Backends:
    """By the name of an attention backend, which may ask for the model's `config`; deterministic: with kernels for
    which the batch does not matter. on_compile: see `attention_backend`."""
    attending = attention_backend(attention, config, dtype, device, on_compile)
    return Backends(kernels=kernels_for(deterministic, device), attention=attending)


def kernels_for(deterministic: bool, device: torch.device) -> Kernels:
    """deterministic: those for which the batch does not matter; else the fastest on `device`."""
    return TiledKernels() if deterministic else fastest_kernels(device)


KERNELS = ("torch", "triton")
"""Those that "auto" chooses from."""


def kernels_unavailable_reason(name: str, device: torch.device) -> str | None:
    """Why the kernels `name` are not taken on `device`; None: they can be. Raises ImportError where they cannot be
    imported."""
    if name != "triton":
        return None
    if envs.KERNELS.get_one_of("auto", "torch") == "torch":
        return f"{envs.KERNELS.name} is torch"
    if device.type != "cuda":
        return "they run on NVIDIA GPUs only"
    importlib.import_module("hocket.layers.triton_kernels")
    return None


def fastest_kernels(device: torch.device) -> Kernels:
    """Triton's on a GPU, if it is installed and HOCKET_KERNELS does not say otherwise; else PyTorch's own."""
    try:
        if kernels_unavailable_reason("triton", device) is not None:
            return PLAIN
    except ImportError as error:
        logger.warning("kernels are not fused: %s", error)
        return PLAIN
    from hocket.layers.triton_kernels import TritonKernels

    return TritonKernels()


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of a model, rows → rows. shape: of a row. key: equal ones need to be tried only once."""

    name: str
    run: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: tuple[Any, ...]


def check_batch_invariance(model: nn.Module, kernels: Kernels) -> None:
    """Try every shape of matrix product in `model`: whether this machine's library treats all rows alike.

    Raises:
        BackendUnavailable: it does not, or a layer was built with other kernels; names the first.
    """
    generator = torch.Generator().manual_seed(0)
    tried = set()
    for product in _products(model, kernels):
        if product.key in tried:
            continue
        tried.add(product.key)
        x = torch.randn(MAX_ROWS, *product.shape, generator=generator).to(product.dtype)
        if not rows_are_alike(product.run, x):
            shape = " × ".join(map(str, product.key[1]))
            why = f"{product.name} ({shape}) in {product.dtype} gives rows other last bits in other company"
            raise BackendUnavailable("backend", "deterministic", why, ["the engine without it"])


def _products(model: nn.Module, kernels: Kernels) -> Iterator[Product]:
    """All matrices: of Linear layers, and those that other modules multiply by themselves, one of each stack."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            if module.kernels is not kernels:
                why = f"{name} was not built with the model's kernels"
                raise BackendUnavailable("backend", "deterministic", why)
            yield _linear(name, module.weight, module.bias, kernels)
            continue
        for key, value in module.named_parameters(recurse=False):
            if value.dim() == 3 and len(value):
                yield _linear(f"{name}.{key}", value[0], None, kernels)
            elif value.dim() == 2:
                yield _linear(f"{name}.{key}", value, None, kernels)
        yield from getattr(module, "products", lambda: ())()


def _linear(name: str, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Product:
    return Product(
        name=name,
        run=lambda x: kernels.linear(x, weight, bias),
        shape=(weight.shape[1],),
        dtype=weight.dtype,
        key=("linear", tuple(weight.shape), weight.dtype, bias is None),
    )
