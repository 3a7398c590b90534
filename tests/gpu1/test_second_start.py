"""A second start is quicker than the first: what was compiled is kept, and the line that says what runs says where."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(home: Path) -> tuple[float, str]:
    """Seconds until ready, and all of that line."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "hocket.cli.main", "generate", "--model", "tiny", "--device", "cuda"]
    command += ["--prompt-token-ids", "5,6,7", "--max-tokens", "2", "--skip-tokenizer-init"]
    environment["HOME"] = str(home)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stderr.splitlines() if "ready in" in line)
    return float(re.search(r"ready in ([\d.]+) s", line)[1]), line  # type: ignore[index]


def test_r105_the_second_start_is_quicker(tmp_path: Path) -> None:
    first_s, line = start(tmp_path)
    second_s, _ = start(tmp_path)
    print(line, f"\nfirst {first_s} s, second {second_s} s")
    assert second_s < first_s
    kept = re.search(r"kept for the next start in (.*)$", line)[1].split(", ")  # type: ignore[index]
    assert any(any(Path(folder).iterdir()) for folder in kept if Path(folder).is_dir()), kept
