"""Loading block-scaled fp8 checkpoints: expanded exactly, with one warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import make
from loading import Tensors, edited, failure, loaded

from hocket.models.loader import expand_fp8

BLOCK = (16, 24)


def to_fp8(tensors: Tensors) -> None:
    """Block-scaled fp8 for every projection, leaving in `tensors` what expansion must give back exactly."""
    for name in list(tensors):
        value = tensors[name]
        if not any(part in name for part in ("_proj", "experts.")) or "norm" in name:
            continue
        rows, columns = (-(-n // b) for n, b in zip(value.shape[-2:], BLOCK, strict=True))
        scale = torch.rand(*value.shape[:-2], rows, columns) + 0.5
        tensors[name] = value.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale


def plain_expansion(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        scale = tensors.pop(name).repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)
        key = name.removesuffix("_scale_inv")
        value = tensors[key].float()
        tensors[key] = (value * scale[..., : value.shape[-2], : value.shape[-1]]).contiguous()


QUANTIZED: dict[str, object] = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}
}


@pytest.mark.parametrize("layout", ["published", "fused"])
def test_fp8_blocks_are_expanded(
    layout: str, checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    quantized = edited(make("v3", checkpoints, layout), tmp_path / "q", to_fp8, QUANTIZED)
    expanded = edited(quantized, tmp_path / "e", plain_expansion)
    expected = loaded(expanded)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        model = loaded(quantized)
    assert len(caplog.records) == 1
    assert "fp8 tensors are expanded" in caplog.text
    for key, value in model.named_parameters():
        assert torch.equal(value, expected.get_parameter(key)), key


def test_fp8_without_or_with_short_scales(checkpoints: Path, tmp_path: Path) -> None:
    quantized = edited(make("v3", checkpoints), tmp_path / "q", to_fp8, QUANTIZED)
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    without = edited(quantized, tmp_path / "a", lambda t: t.pop(scale))
    assert "o_proj.weight has dtype F8_E4M3 and no scale" in failure(without)
    short = edited(quantized, tmp_path / "b", lambda t: t.update({scale: torch.ones(1, 1)}))
    assert f"{scale} is [1, 1]" in failure(short)


def test_expand_fp8_from_a_later_row() -> None:
    value = torch.ones(5, 3).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    out = expand_fp8(value, scale, (4, 2), 2, "scale")
    assert out.tolist() == [[1, 1, 2]] * 2 + [[3, 3, 4]] * 3
