"""Triton kernels on a CPU, in Triton's interpreter: collected only where Triton is installed and was asked to interpret
(`make test-triton`), since that holds for the whole process. Memory that nobody wrote is full of NaN."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _spoilt_memory() -> Iterator[None]:
    """`torch.empty` and its like give NaN, and of integers the largest: what a kernel left out, or read too early,
    shows in the result. PyTorch does so where algorithms must be deterministic (`fill_uninitialized_memory`)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
