"""Which GPUs are found without torch, and what is refused on them, on a host that pretends to have some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.config import devices
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import ConfigError


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.11.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def resolved(**options: Any) -> Any:
    return resolve(Options.from_dict(options))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3", 2)]
)
def test_visible_gpus(visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.num_gpus() == count


@pytest.mark.usefixtures("two_gpus")
def test_a_torch_without_cuda_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert devices.num_gpus() == 0


@pytest.mark.usefixtures("two_gpus")
def test_auto_takes_the_gpus_and_the_checkpoints_dtype() -> None:
    config = resolved(data_parallel_size=2)
    assert (config.device, config.dtype) == ("cuda", config.model.dtype)
    on_cpu = resolved(device="cpu", data_parallel_size=4)
    assert (on_cpu.device, on_cpu.dtype) == ("cpu", "float32")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 3}, "data_parallel_size: 3 is not allowed; allowed: at most 2, the GPUs of this host"),
        (
            {"deterministic": True},
            "deterministic: True is not allowed on cuda, where no backend is batch-invariant; allowed: ",
        ),
    ],
)
def test_what_is_not_built_for_gpus_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.usefixtures("two_gpus")
def test_overlap_and_an_emulated_link_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}
    config = resolved(**options, emulate_link_gb_per_s=46.0)
    assert (config.device, config.overlap.num_ubatches) == ("cuda", 2)
    assert config.parallel.emulated_link is not None
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    assert resolved(data_parallel_size=2).overlap.num_ubatches == 3


def test_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    assert resolved().device == "cpu"
    with pytest.raises(ConfigError, match=r"device: 'cuda' is not allowed; allowed: cpu \(there is no NVIDIA GPU"):
        resolved(device="cuda")
