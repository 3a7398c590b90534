"""The README's examples, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line for language, code in BLOCKS if language == "bash" for line in code.splitlines() if line.startswith("hocket ")
]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(command: list[str], tmp_path: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert len(PYTHON) == 1
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("code", PYTHON)
def test_python(code: str, tmp_path: Path) -> None:
    out = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert "In the beginning" in out
    assert "The lady was" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-m", "hocket.cli.main", *shlex.split(command)[1:]], tmp_path).strip()


def test_its_make_verbs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for verb in re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE):
        assert f"\n{verb}:" in makefile
