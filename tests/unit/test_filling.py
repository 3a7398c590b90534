"""Filling tensors from files: whole, in pieces, converted, by several threads, and what cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from hocket.models import filling
from hocket.models.filling import Filler, Span

CPU = torch.device("cpu")
NUMBERS = torch.arange(1000, dtype=torch.float32) - 300


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Four bytes, then NUMBERS."""
    path = tmp_path / "numbers"
    path.write_bytes(b"head" + NUMBERS.numpy().tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def span(file: int, first: int, stop: int) -> Span:
    return Span(file=file, offset=4 + 4 * first, num_bytes=4 * (stop - first), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("piece_bytes", [10, 400, 1 << 20])
def test_whole_and_in_pieces(piece_bytes: int, dtype: torch.dtype, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "CACHED_BYTES", piece_bytes)
    target = torch.full((3, 20, 15), float("nan"), dtype=dtype)
    Filler(CPU).fill(target[1:], span(file, 250, 850))
    assert torch.equal(target[1:], NUMBERS[250:850].view(2, 20, 15).to(dtype))
    assert target[0].isnan().all()
    nothing = torch.empty(0, dtype=dtype)
    Filler(CPU).fill(nothing, span(file, 5, 5))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_jobs(num_threads: int, file: int) -> None:
    filler = Filler(CPU)
    filler.num_threads = num_threads
    target = torch.full((50, 20), float("nan"))
    jobs = [partial(filler.fill, target[i], span(file, 20 * i, 20 * i + 20)) for i in range(50)]
    for count, _ in enumerate(filler.run(jobs)):
        assert torch.equal(target[count], NUMBERS[20 * count : 20 * count + 20])
    assert count == 49
    assert torch.equal(target.view(-1), NUMBERS)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_first_failure_ends_it(num_threads: int, file: int) -> None:
    filler = Filler(CPU)
    filler.num_threads = num_threads
    target = torch.zeros(10, 20)
    begun: list[int] = []

    def job(i: int) -> None:
        begun.append(i)
        time.sleep(0.005 if i > 4 else 0)  # the 500 would take most of a second
        filler.fill(target[i], span(file, 990 if i == 4 else 0, 1010 if i == 4 else 20))

    results = filler.run([partial(job, min(i, 9)) for i in range(500)])
    assert list(islice(results, 4)) == [None] * 4
    with pytest.raises(OSError, match="ends too early"):
        next(results)
    assert len(begun) < 500
