"""Which backends could run here, asked of the registries that the engine builds from. Knows no backend by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hocket.attention.registry import unavailable_reason as attention_reason
from hocket.config.backends import ATTENTION, EXECUTORS, EXPERTS, GPU_EXPERTS, GPU_TRANSPORTS, TRANSPORTS, check_device
from hocket.config.engine import EngineConfig
from hocket.doctor.child import described
from hocket.errors import BackendUnavailable
from hocket.models.backends import KERNELS
from hocket.models.backends import kernels_unavailable_reason as kernels_reason
from hocket.moe.experts.registry import experts_class
from hocket.moe.transport.registry import traits, transport_class
from hocket.overlap.thread_state import make_baton


def backends(config: EngineConfig) -> list[dict[str, Any]]:
    """{kind, name, available, reason} of each; the reason is None where it is available. Transports that are have
    `traits` too."""
    dtype, device, model = getattr(torch, config.dtype), torch.device(config.device), config.model

    def attention(name: str) -> str | None:
        return attention_reason(name, model, dtype, device)

    def experts(name: str) -> str | None:
        check_device("experts backend", name, config.device, GPU_EXPERTS, EXPERTS)
        return experts_class(name).unsupported_reason(model.hidden_size, model.moe.intermediate_size, dtype)

    def transport(name: str) -> str | None:
        check_device("all2all backend", name, config.device, GPU_TRANSPORTS, TRANSPORTS)
        reason: str | None = transport_class(name).unavailable_reason(config.device)
        return reason

    def executor(name: str) -> None:
        make_baton(name, 2, config.step_timeout_s, torch.device("cpu")).close()

    return [
        *(_one("attention", name, attention) for name in ATTENTION),
        *(_one("experts", name, experts) for name in EXPERTS),
        *(_with_traits(_one("transport", name, transport)) for name in TRANSPORTS),
        *(_one("kernels", name, lambda name: kernels_reason(name, device)) for name in KERNELS),
        *(_one("executor", name, executor) for name in EXECUTORS),
    ]


def _with_traits(transport: dict[str, Any]) -> dict[str, Any]:
    return transport | {"traits": traits(transport["name"])} if transport["available"] else transport


def _one(kind: str, name: str, find: Callable[[str], Any]) -> dict[str, Any]:
    """find: returns what keeps the backend from running as a text, or raises it; anything else means that it runs."""
    try:
        found = find(name)
        reason = found if isinstance(found, str) else None
    except BackendUnavailable as error:
        reason = error.why
    except Exception as error:  # a library that is there and broken: whatever it raises is the reason
        reason = described(error)
    return {"kind": kind, "name": name, "available": reason is None, "reason": reason}
