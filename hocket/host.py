"""Small values that the host knows, on their way to a device without the host waiting for it. Knows not what they are.

`torch.tensor(values, device=...)` waits until the device has done all that was launched before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def sent(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor of `dtype` on `device`. On a CPU an array of that dtype is not copied."""
    x = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return x
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
