"""The linter looks at every file of the package and of its tests: by itself it leaves out folders of some names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_file_is_left_out() -> None:
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "hocket", "tests"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.split("\n")
    there = {str(path) for folder in ("hocket", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert len(there) > 300
    assert not there - set(shown)
