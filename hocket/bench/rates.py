"""What this GPU reaches, measured by one big copy and big matrix products, in a process of its own. Knows no model.

python -m hocket.bench.rates        prints one line of JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hocket.bench.floor import Rates
from hocket.dist.processes import rank_environment
from hocket.errors import ConfigError, HocketError

COPY_BYTES = 4 << 30
MATRIX = 8192
ROUNDS = 10
LIMIT_S = 120.0
FP8_SPEED_UP = 2.0
"""FLOP/s in fp8 over those in 16 bits where nobody gives them: the ratio of the hardware's peaks."""


@dataclass(frozen=True, kw_only=True)
class GivenRates:
    """What the user says of the device; None: not given."""

    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None


def rates_of(device: str, given: GivenRates) -> Rates | None:
    """The given rates; those that are not given are measured on a GPU. None: on a CPU without any.

    Raises:
        ConfigError: only some are given on a CPU. HocketError: they cannot be measured.
    """
    bytes_per_s, flops_per_s, source = given.bytes_per_s, given.flops_per_s, "given"
    if bytes_per_s is None or flops_per_s is None:
        if device == "cpu":
            if given == GivenRates():
                return None
            field = "flops_per_s" if flops_per_s is None else "bytes_per_s"
            raise ConfigError(field, None, "a number: on a CPU both rates are given, or none")
        found = measured()
        source = "measured at start" if given == GivenRates() else "given in part, else measured at start"
        bytes_per_s, flops_per_s = bytes_per_s or found["bytes_per_s"], flops_per_s or found["flops_per_s"]
    fp8 = given.fp8_flops_per_s or FP8_SPEED_UP * flops_per_s
    return Rates(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, fp8_flops_per_s=fp8, source=source)


def measured() -> dict[str, float]:
    """Rates of GPU 0 in bf16, by a process that leaves nothing on the GPU."""
    command = [sys.executable, "-P", "-m", "hocket.bench.rates"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=rank_environment())
    except subprocess.TimeoutExpired:
        raise HocketError(f"measuring the GPU's rates took longer than {LIMIT_S:g} s; give them instead") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise HocketError(f"the GPU's rates cannot be measured ({why}); give --bytes-per-s and --flops-per-s")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure() -> dict[str, float]:
    """Best of ROUNDS. A copy reads and writes each byte."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {
        "bytes_per_s": 2 * COPY_BYTES / _best_s(torch, lambda: target.copy_(source)),
        "flops_per_s": 2 * MATRIX**3 / _best_s(torch, lambda: a @ b),
    }


def _best_s(torch: Any, work: Any) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    for _ in range(3):
        work()
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return min(float(a.elapsed_time(b)) for a, b in pairwise(events)) / 1e3


if __name__ == "__main__":
    print(json.dumps(_measure()))
