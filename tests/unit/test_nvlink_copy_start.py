"""What keeps `nvlink_copy` from starting is said in one line; no GPU is needed to say it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from hocket.errors import BackendUnavailable, CapacityError, ConfigError
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import StepSizes
from hocket.moe.transport.nvlink_copy import NVLinkCopyTransport

GPU = torch.device("cuda", 0)


def opened(num_local_ranks: int = 2) -> NVLinkCopyTransport:
    group: Any = "a process group"
    transport = NVLinkCopyTransport(ExpertPlacement(8, 2), 0, group, GPU)
    transport.open(
        StepSizes(max_tokens=8192, hidden_size=1024, top_k=4, dtype=torch.bfloat16, num_local_ranks=num_local_ranks)
    )
    return transport


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12345678, 99999999))
    return monkeypatch


@pytest.mark.parametrize("where", ["empty", "rendezvous"])
def test_too_little_memory(two_gpus: pytest.MonkeyPatch, where: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA driver error: out of memory\nthe rest of what torch says")

    two_gpus.setattr(symmetric, "empty", lambda *size, **kwargs: torch.empty(0))
    two_gpus.setattr(symmetric, where, fails)
    with pytest.raises(CapacityError) as caught:
        opened()
    row_bytes = 2 * 1024 + 32 + 16  # hidden state, ids and number, weights
    needed = 2 * 8192 * (row_bytes + 2 * 1024)
    assert str(caught.value) == (
        f"nvlink_copy: it takes {needed:,} bytes of the GPU, which has 12,345,678 left: lower --max-num-batched-tokens"
    )


def test_no_multicast_is_set_up(two_gpus: pytest.MonkeyPatch) -> None:
    """PyTorch would, where a host has it."""
    seen = []

    def rendezvous(local: torch.Tensor, group: object) -> Any:
        seen.append(os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"])
        return SimpleNamespace(rank=0, world_size=2, get_buffer=lambda *args: torch.empty(0))

    two_gpus.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    two_gpus.setattr(symmetric, "empty", lambda *size, **kwargs: torch.empty(0))
    two_gpus.setattr(symmetric, "rendezvous", rendezvous)
    opened()
    two_gpus.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    assert seen == ["1"]


def test_other_failures_are_not_called_too_little_memory(two_gpus: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    two_gpus.setattr(symmetric, "empty", fails)
    with pytest.raises(RuntimeError, match="operation not supported"):
        opened()


def test_gpus_that_do_not_reach_each_other(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    with pytest.raises(BackendUnavailable, match="GPU 0 cannot write to the memory of GPU 1") as caught:
        opened()
    assert "allgather_reducescatter" in str(caught.value)


def test_several_hosts() -> None:
    with pytest.raises(ConfigError, match="for ranks on several hosts"):
        opened(num_local_ranks=1)
