"""Probes in processes of their own: each ends in time, whatever it does, and what it found before is kept."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hocket.doctor import children
from hocket.doctor.children import Outcome

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders are made where this test can count them, and the processes find tests/doctor_probes.py."""
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{TESTS.parent}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run(*what: str, limit_s: float = LIMIT_S, **options: Any) -> list[Outcome]:
    return children.run("doctor_probes", {"what": what}, count=len(what), limit_s=limit_s, **options)


def assert_nothing_left(folder: Path, outcomes: list[Outcome]) -> None:
    assert not list(folder.iterdir())
    pids = [outcome.found[0]["pid"] for outcome in outcomes if outcome.found]
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_findings_come_back(alone: Path) -> None:
    outcomes = run("work", "work", "work")
    assert [outcome.found[1] for outcome in outcomes] == [{"index": n, "count": 3} for n in range(3)]
    assert children.problems("probe", outcomes) == []
    assert_nothing_left(alone, outcomes)


def test_a_probe_that_hangs_is_ended_and_named(alone: Path) -> None:
    started = time.monotonic()
    outcomes = run("work", "hang", limit_s=8.0)
    assert time.monotonic() - started < LIMIT_S
    assert children.problems("links", outcomes) == [
        "links, process 1 of 2: hangs: not done after 8 s, while about to hang"
    ]
    assert_nothing_left(alone, outcomes)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raise", "ValueError: planted"),
        ("die", "exit code 9, while about to die; it said last: last words"),
    ],
)
def test_failures_are_one_line_and_end_the_others(alone: Path, what: str, error: str) -> None:
    started = time.monotonic()
    outcomes = run("hang", what, limit_s=1000.0)
    assert time.monotonic() - started < LIMIT_S
    assert outcomes[1].error == error
    assert outcomes[0].error is not None
    assert outcomes[0].error.endswith("because another process failed")
    assert_nothing_left(alone, outcomes)


def test_a_crash_is_named(alone: Path) -> None:
    outcomes = run("crash")
    assert children.problems("torch", outcomes)[0].startswith(
        "torch: killed by signal 6: Aborted, while about to crash"
    )
    assert_nothing_left(alone, outcomes)


def test_a_probe_that_cannot_be_imported() -> None:
    (outcome,) = children.run("hocket.doctor.no_such_probe", {}, limit_s=LIMIT_S)
    assert outcome.error == "ModuleNotFoundError: No module named 'hocket.doctor.no_such_probe'"


def test_an_interrupted_front_leaves_nothing(alone: Path) -> None:
    def interrupt(at: str) -> None:
        if at == "about to hang":
            pids.extend(int(entry.name) for entry in Path("/proc").iterdir() if _is_probe(entry))
            raise KeyboardInterrupt

    others = {int(entry.name) for entry in Path("/proc").iterdir() if _is_probe(entry)}  # ranks of other tests
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run("hang", "hang", on_progress=interrupt)
    assert set(pids) - others
    assert not [pid for pid in pids if pid not in others and Path(f"/proc/{pid}").exists()]
    assert not list(alone.iterdir())


def _is_probe(entry: Path) -> bool:
    """Whether a process is one that this process started."""
    try:
        return entry.name.isdecimal() and (entry / "stat").read_text().split()[3] == str(os.getpid())
    except (OSError, IndexError):
        return False
