"""`hocket doctor` as a command, on a CPU with real ranks, also with links that hang or tell lies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from patched_ranks import environment_of

from hocket.doctor.links import SIZES
from hocket.doctor.show import MAX_WIDTH

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
COMMAND = [sys.executable, "-P", "-m", "hocket.cli.main", "doctor", "--device", "cpu"]


def environment(folder: Path, patch: str | None = None) -> dict[str, str]:
    """Temporary files in `folder`, where they can be counted; `patch`: a function that every process calls first."""
    planted = {} if patch is None else environment_of(f"doctor_probes:{patch}")
    path = os.pathsep.join(filter(None, (str(ROOT), planted.get("PYTHONPATH"))))
    return os.environ | planted | {"PYTHONPATH": path, "TMPDIR": str(folder)}


def run(folder: Path, *flags: str, patch: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *flags], env=environment(folder, patch), capture_output=True, text=True, timeout=LIMIT_S, cwd=folder
    )
    assert not list(folder.iterdir())
    assert "Traceback" not in done.stderr
    return done


def test_json_has_everything(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "--data-parallel-size", "2", "--enable-expert-parallel")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    kinds: dict[str, Any] = {
        "hocket": str,
        "python": str,
        "packages": dict,
        "kernel_caches": dict,
        "driver": (str, type(None)),
        "cpu": dict,
        "config": dict,
        "versions": dict,
        "memory_bytes": int,
        "gpus": list,
        "backends": list,
        "choice": dict,
        "links": dict,
        "problems": list,
    }
    assert report.keys() == kinds.keys()
    assert [name for name, kind in kinds.items() if not isinstance(report[name], kind)] == []
    assert report["problems"] == []
    assert report["choice"]["experts"] in {one["name"] for one in report["backends"] if one["kind"] == "experts"}
    assert (report["config"]["experts_over"], report["choice"]["problems"]) == (2, [])
    rows = report["links"]["collectives"]
    assert [row["op"] for row in rows] == ["all-to-all"] * 2 + ["all-gather"] * 2
    assert [row["bytes"] for row in rows] == [size // 2 for size in SIZES["cpu"]] * 2
    for row in rows:
        assert 0 < row["us"]["min"] <= row["us"]["median"] <= row["us"]["max"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"]["median"] / 1e3)


def test_text_fits_and_names_what_is_missing(tmp_path: Path) -> None:
    model = ROOT / "benchmarks" / "shapes" / "deepseek-v2-lite"
    done = run(tmp_path, "--no-links", "--model", str(model), "--kv-cache-memory-bytes", "1000")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    problems = " ".join(lines[next(n for n, line in enumerate(lines) if line.startswith("✗")) :])
    assert "has no *.safetensors file" in problems
    assert "tokenizer.json" in problems
    assert "not measured" in done.stdout


@pytest.mark.parametrize(
    ("flags", "code"), [(["--enable-dbo"], 2), (["--limit", "0"], 2), (["--model", "no-such-folder"], 1)]
)
def test_wrong_usage(tmp_path: Path, flags: list[str], code: int) -> None:
    done = run(tmp_path, *flags)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("hang_in_all_gather", "process 1 of 2: hangs: not done after 20 s, while all-gather of 4 KiB over 2 ranks"),
        ("lose_an_element", "process 1 of 2: HocketError: wrong numbers arrived: [1, 0] of 512 from rank 0 to 1"),
    ],
)
def test_a_link_that_fails_is_named_and_the_rest_is_told(tmp_path: Path, patch: str, message: str) -> None:
    done = run(tmp_path, "--json", "--limit", "20", patch=patch)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert any(problem.startswith("transfers between ranks (gloo), " + message) for problem in report["problems"])
    assert [row["op"] for row in report["links"]["collectives"]] == ["all-to-all"] * (
        2 if "hang" in patch else len(report["links"]["collectives"])
    )
    assert report["choice"]["problems"] == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_doctor_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    env = environment(tmp_path, "hang_in_all_gather")
    front = subprocess.Popen([*COMMAND, "--limit", "100"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + LIMIT_S
    while len(ranks := started_by(front.pid, "hocket.doctor.links")) < 2:
        assert time.monotonic() < deadline
        assert front.poll() is None
        time.sleep(0.05)
    front.send_signal(how)
    _, said = front.communicate(timeout=LIMIT_S)
    assert front.returncode == (130 if how is signal.SIGINT else -how)
    assert said == (b"hocket: interrupted\n" if how is signal.SIGINT else b"")
    deadline = time.monotonic() + (0 if how is signal.SIGINT else LIMIT_S)
    while (alive := [pid for pid in ranks if command_of(pid)]) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, alive or list(tmp_path.iterdir())
        time.sleep(0.05)


def started_by(parent: int, module: str) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if module in command_of(pid) and parent_of(pid) == parent]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def command_of(pid: int) -> list[str]:
    """Empty for a process that has ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []
