"""Loading onto a GPU: threads and pinned pieces give what the CPU's plain path gives."""

from __future__ import annotations

from pathlib import Path

import paged
import pytest
import torch
from fp8_checkpoints import write
from loading import loaded

from hocket.models import filling
from hocket.models.filling import Filler

GPU = torch.device("cuda")


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_on_a_cpu(piece_bytes: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fp8 checkpoint expanded on the way, its other tensors fp32: read as they are and converted."""
    monkeypatch.setenv("HOCKET_FP8", "0")
    path = write(tmp_path / "a")
    expected = loaded(path, dtype=dtype)
    monkeypatch.setattr(filling, "PIECE_BYTES", piece_bytes)
    assert Filler(GPU).num_threads > 1
    with torch.inference_mode():  # as engines load
        model = paged.load(path, dtype, device=GPU)
    for key, value in model.named_parameters():
        found = value.cpu()
        error = (found.double() - expected.get_parameter(key).double()).abs().max()
        assert torch.equal(found, expected.get_parameter(key)), f"{key}: off by {float(error)}"
