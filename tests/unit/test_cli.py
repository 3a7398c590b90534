"""The command line as scripts see it: exit codes, Ctrl-C while it imports, and what goes to which stream."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import InProcessGroup

from hocket.cli.app import EXIT_CODES
from hocket.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _logging_stays() -> Iterator[None]:
    """The command sets up this process's logging."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


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
        (("bench", "overlap", "--data-parallel-size", "1"), 2),
        (("bench", "overlap", "--no-enable-expert-parallel"), 2),
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


class Terminal(io.StringIO):
    """Standard error as a person sees it."""

    def isatty(self) -> bool:
        return True


def generate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What a run with its rank in this process writes to standard error, which is a terminal; output is not."""
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr("sys.stderr", terminal)
        patched.setattr("hocket.llm.RankGroup.start", lambda *_: InProcessGroup())
        assert run(patched, "generate", "--prompt", "In the", "--max-tokens", "2", *arguments) == 0
    return terminal.getvalue()


def test_progress_belongs_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever becomes of the results."""
    for arguments in ((), ("--json",)):
        error = generate(monkeypatch, *arguments)
        out = capsys.readouterr().out
        for what in ("loading", "generating"):
            assert what in error
            assert what not in out
    assert json.loads(out)["outputs"][0]["prompt"] == "In the"


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_what_runs_is_said_once(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("HOCKET_LOG_LEVEL", level)
    assert generate(monkeypatch).count("ready in") == 1


def test_sigterm_is_as_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a command does at its end is done: else a rank that hangs would be left behind."""
    ended = []

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
            return 0
        finally:
            ended.append("ranks")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hocket.cli.app.run", command)
    assert run(monkeypatch, "generate") == 130
    assert ended == ["ranks"]
    assert capsys.readouterr().err == "hocket: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before
