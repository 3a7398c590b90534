"""What of a model and its transport takes a number of multiprocessors, as the limits of an `SmBudget`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hocket.config.engine import EngineConfig
from hocket.layers.linear import Fp8Linear
from hocket.moe.experts.base import Experts
from hocket.moe.experts.deep_gemm import DeepGemmExperts
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.experts.grouped_mm import GroupedMMExperts
from hocket.moe.experts.triton_grouped import TritonGroupedExperts
from hocket.moe.transport.base import Transport
from hocket.overlap.green_stream import SM_STEP, green_stream
from hocket.overlap.sm_budget import UNLIMITED, Limit, SmBudget, comm_share, divide
from hocket.quant import fp8

logger = logging.getLogger(__name__)
_PAIR = 2
"""Products that share what they load run on two multiprocessors at once."""


def budget_of(model: nn.Module, transport: Transport, config: EngineConfig, device: torch.device) -> SmBudget:
    """What split steps of `model` are to be run under.

    Raises:
        ConfigError: transfers would leave no multiprocessor to compute.
        BackendUnavailable: there are no green contexts here, and one was asked for.
    """
    overlap = config.overlap
    if device.type != "cuda" or overlap.num_ubatches == 1:
        return UNLIMITED
    comm = comm_share(overlap.comm_sms, transport.max_sms, config.parallel.max_nccl_ctas)
    total = torch.cuda.get_device_properties(device).multi_processor_count
    shares = divide(comm, total, SM_STEP if overlap.use_green_context else _PAIR)
    if shares is None:
        return UNLIMITED
    how = "kernels that can be told"
    stream: dict[str, Any] = {}
    if overlap.use_green_context:
        how = "a green context"
        stream["stream"] = green_stream(device, shares.compute_sms).entered
    said = "split steps: of %d multiprocessors transfers take at most %d, compute %d (%s)"
    logger.info(said, total, shares.comm_sms, shares.compute_sms, how)
    return SmBudget(shares, (transport.limit_sms,), compute_limits(model, total), **stream)


def compute_limits(model: nn.Module, total: int) -> Iterator[Limit]:
    """Of the kernels that `model` multiplies with. Products of cuBLAS and attention are not among them. total: the
    GPU's multiprocessors."""
    modules = list(model.modules())
    told = [module for module in modules if isinstance(module, TritonGroupedExperts)]
    if told:
        yield partial(limit_experts, told)
    if any(isinstance(module, DeepGemmExperts | Fp8Experts | Fp8Linear) for module in modules):
        yield fp8.limit_sms
    if any(isinstance(module, GroupedMMExperts) for module in modules):
        yield partial(_limit_grouped_mm, total)


def limit_experts(told: Sequence[Experts], num_sms: int) -> Callable[[], None]:
    """A `Limit` of backends that are told at each call."""
    found = [experts.num_sms for experts in told]

    def undo() -> None:
        for experts, before in zip(told, found, strict=True):
            experts.num_sms = before

    for experts in told:
        experts.num_sms = num_sms
    return undo


def _limit_grouped_mm(total: int, num_sms: int) -> Callable[[], None]:
    """A `Limit` of torch's own grouped products and of cuBLASLt, for the whole process. torch calls it experimental,
    and says so once on standard error."""
    found = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(total - num_sms)
    return partial(torch._C._set_sm_carveout_experimental, found)
