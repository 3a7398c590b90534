"""GPUs whose memory does not suffice, at start: one line with what is needed, what is free, and what to lower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hocket.config import kernel_caches as caches
from hocket.errors import CapacityError, OverlapError, UBatchFailed
from hocket.moe.transport import deepep_library
from hocket.worker.profile import room_for

OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.2 GiB is free."
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 1000 bytes free of 5000."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 7_300)


@pytest.mark.usefixtures("gpu")
def test_r054_a_librarys_buffer() -> None:
    for name, advice in (("low_latency", "lower --max-num-batched-tokens"), ("high_throughput", "take --all2all")):
        deepep_library.check_room(name, 1000, advice)
        with pytest.raises(CapacityError) as caught:
            deepep_library.check_room(name, 1001, advice)
        assert str(caught.value) == f"{name} needs 1,001 bytes, and 1,000 are free: {advice}"


def fail(outer: type[Exception] | None, text: str) -> None:
    """An allocation fails, within what `outer` reports."""
    try:
        raise torch.OutOfMemoryError(text)
    except torch.OutOfMemoryError as error:
        if outer is None:
            raise
        raise outer("ubatch 0, sparse layer 1, dispatch") from error


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("outer", [None, UBatchFailed, OverlapError])
def test_r054_buffers_of_a_steps_transfers(outer: type[Exception] | None) -> None:
    """Wherever in the step the allocation failed."""
    with pytest.raises(CapacityError) as caught, room_for(8192, 6_000, 300):
        fail(outer, OOM)
    assert str(caught.value) == (
        "a step of 8192 tokens, with the buffers of its transfers, needs 7,000 bytes and 2.50 GiB more, "
        "and 6,000 bytes were free before it: lower --max-num-batched-tokens"
    )


@pytest.mark.usefixtures("gpu")
def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(UBatchFailed, match=r"^wrong$"), room_for(8192, 6_000, 300):
        raise UBatchFailed("wrong")
    with pytest.raises(CapacityError, match="needs 7,000 bytes and more, and"), room_for(1, 6_000, 300):
        raise torch.OutOfMemoryError("said otherwise")


def test_r105_where_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the libraries' own variables say; nothing on a CPU, where nothing is compiled."""
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(caches.importlib.util, "find_spec", lambda name: name)
    expected = {
        "triton": tmp_path / ".triton/cache",
        "flashinfer": tmp_path / ".cache/flashinfer",
        "deep_gemm": tmp_path / ".deep_gemm",
    }
    assert caches.kernel_caches() == expected
    folders = ", ".join(str(folder) for folder in expected.values())
    assert caches.caches_text("cuda") == f"; what was compiled is kept for the next start in {folders}"
    assert caches.caches_text("cpu") == ""
    monkeypatch.setenv("TRITON_HOME", "/t")
    assert caches.kernel_caches()["triton"] == Path("/t/.triton/cache")
    for name, package in (("TRITON_CACHE_DIR", "triton"), ("DG_JIT_CACHE_DIR", "deep_gemm")):
        monkeypatch.setenv(name, "/elsewhere")
        assert caches.kernel_caches()[package] == Path("/elsewhere")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/f")
    assert caches.kernel_caches()["flashinfer"] == Path("/f/.cache/flashinfer")
    monkeypatch.setattr(caches.importlib.util, "find_spec", lambda name: None)
    assert caches.caches_text("cuda") == ""
