"""The command line as scripts see it: exit codes, Ctrl-C at any time, and what goes to which stream."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.cli.app import EXIT_CODES
from hocket.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`hocket` with these arguments, in this process: its exit code."""
    monkeypatch.setattr("sys.argv", ["hocket", *arguments])
    return main()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("--help",), 0),
        (("explain",), 0),
        (("explain", "--model", "no/such/folder"), 1),  # CheckpointError
        (("bench", "handover", "--output", "no/such/folder/file"), 2),  # ConfigError
        (("explain", "--deterministic", "--attention-backend", "sdpa"), 2),  # BackendUnavailable
        (("explain", "--block-size", "two"), 2),  # the command line's own
        (("explain", "--no-such-option"), 2),
        (("no-such-command",), 2),
        ((), 2),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int
) -> None:
    assert run(monkeypatch, *arguments) == code
    error = capsys.readouterr().err
    assert len(error.splitlines()) == (1 if code and arguments else 0), error


def test_exit_codes_are_documented(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--help")
    assert EXIT_CODES.split() == capsys.readouterr().out.split()[-len(EXIT_CODES.split()) :]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"Exit codes: [^.]*", readme)
    assert re.findall(r"\b\d+\b", sentence) == re.findall(r"\b\d+\b", EXIT_CODES)


@pytest.mark.parametrize("module", ["hocket.cli.app", "typer", "hocket.config.options", "hocket.bench.overlap"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["hocket", "bench", "overlap"]
from hocket.cli.main import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hocket: interrupted\n")
