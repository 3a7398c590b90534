"""The survey of torch, on a host whose GPUs are pretended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.doctor import survey
from hocket.doctor.child import Task, notes_file

FREE_BYTES = [30, 20, 10]


def surveyed(folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> tuple[dict[str, Any], list[int | None]]:
    """What the probe found, and what memory the choice was made for."""
    monkeypatch.setattr("hocket.config.resolve.num_gpus", lambda: len(FREE_BYTES))
    config = resolve(Options(data_parallel_size=num_ranks))
    assert config.device == "cuda"
    arguments = {"config": msgspec.json.encode(config).decode()}
    (folder / "arguments").write_text(json.dumps({"count": 1, "arguments": arguments}))
    asked: list[int | None] = []

    def choice(_: Any, free_bytes: int | None) -> dict[str, Any]:
        asked.append(free_bytes)
        raise ValueError("planted")

    monkeypatch.setattr(survey, "choice", choice)
    try:
        survey.probe(Task(str(folder), 0))
    finally:
        found: dict[str, Any] = {}
        for line in notes_file(str(folder), 0).read_text().splitlines():
            found |= json.loads(line).get("found", {})
        assert found["backends"]
        assert found["memory_bytes"] > 0
    return found, asked


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_memory_is_that_of_the_fullest_gpu_that_ranks_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(survey, "gpus", lambda: [{"free_bytes": free} for free in FREE_BYTES])
    found, asked = surveyed(tmp_path, monkeypatch, num_ranks)
    assert asked == [FREE_BYTES[num_ranks - 1]]
    assert found["gpus"] == [{"free_bytes": free} for free in FREE_BYTES]
    assert found["choice"] == {"problems": ["the engine cannot be built: ValueError: planted"]}


def test_a_driver_that_fails_leaves_what_was_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus() -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    monkeypatch.setattr(survey, "gpus", gpus)
    with pytest.raises(RuntimeError, match="no CUDA-capable device"):
        surveyed(tmp_path, monkeypatch, 1)
