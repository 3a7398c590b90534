"""The README's examples, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
LINES = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
ALL_PYTHON = [code for language, code in BLOCKS if language == "python"]
PYTHON = [code for code in ALL_PYTHON if "openai" not in code]
COMMANDS = [line for line in LINES if line.startswith("hocket ") and not line.startswith("hocket serve ")]
SERVE = [line for line in LINES if line.startswith("hocket serve ")]
REQUESTS = [line for line in LINES if line.startswith("curl ")]
CLIENTS = [code for code in ALL_PYTHON if "openai" in code]
PORT = "8000"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(command: list[str], tmp_path: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert len(PYTHON) == 1
    assert len(COMMANDS) >= 3
    assert (len(SERVE), len(REQUESTS), len(CLIENTS)) == (1, 4, 1)
    assert all(f"127.0.0.1:{PORT}/" in example for example in REQUESTS + CLIENTS)


@pytest.mark.parametrize("code", PYTHON)
def test_python(code: str, tmp_path: Path) -> None:
    out = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert "In the beginning" in out
    assert "The lady was" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-m", "hocket.cli.main", *shlex.split(command)[1:]], tmp_path).strip()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the README's server listens: on a free port, in the tests."""
    pytest.importorskip("fastapi")
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "hocket.cli.main", *shlex.split(SERVE[0])[1:], "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env=ENVIRONMENT, cwd=log.parent)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.findall(r"serving at http://127.0.0.1:(\d+) ", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield found[0]
        process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("request_line", REQUESTS)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(request_line: str, port: str, tmp_path: Path) -> None:
    out = asked(request_line, port, tmp_path)
    assert '"text"' in out or '"delta"' in out or out == '{"status":"ok"}' or "# HELP hocket:steps" in out


def asked(request_line: str, port: str, tmp_path: Path) -> str:
    command = shlex.split(request_line.replace(f":{PORT}/", f":{port}/"))
    return run([*command, "--fail-with-body", "--silent", "--show-error"], tmp_path)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_metrics_show_that_a_single_prompt_is_split(port: str, tmp_path: Path) -> None:
    for request_line in REQUESTS:
        out = asked(request_line, port, tmp_path)
    assert re.search(r'hocket:overlap_steps_total\{[^}]*phase="prefill",reason="split"\} [1-9]', out), out


@pytest.mark.parametrize("code", CLIENTS)
def test_client(code: str, port: str, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    assert run([sys.executable, "-c", code.replace(f":{PORT}/", f":{port}/")], tmp_path).strip()


def test_its_make_verbs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for verb in re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE):
        assert f"\n{verb}:" in makefile
