"""Values on their way from the host to a device: the same values, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hocket.host import sent

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [[], [3], [-1, 2**40], np.array([5, 6], dtype=np.int32)])
def test_values(values: Sequence[int] | np.ndarray) -> None:
    found = sent(values, torch.int64, CPU)
    assert (found.dtype, found.tolist()) == (torch.int64, list(values))


def test_floats() -> None:
    assert sent([0.1, -float("inf")], torch.float32, CPU).equal(torch.tensor([0.1, -float("inf")]))


def test_on_another_device() -> None:
    found = sent([1, 2], torch.int32, torch.device("meta"))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.int32, (2,))


def test_an_array_on_a_cpu_is_not_copied() -> None:
    values = np.zeros((2, 2), dtype=np.int32)
    found = sent(values, torch.int32, CPU)
    values[:] = 7
    assert found.tolist() == [[7, 7], [7, 7]]
