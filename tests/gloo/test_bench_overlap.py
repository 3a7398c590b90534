"""`hocket bench overlap`: its figures hang together, and different tokens make it fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patched_ranks import environment_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--prompt-len", "64", "--prompts-per-rank", "2", "--repeats", "2", "--dbo-prefill-token-threshold", "64")


def bench(*args: str, **variables: str) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "hocket.cli.main", "bench", "overlap", *SMALL, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    return done.returncode, done.stdout, done.stderr


def row_of(out: str) -> dict[str, Any]:
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    return dict(row)


@pytest.mark.alone
def test_off_and_on_over_a_link_as_slow_as_compute(tmp_path: Path) -> None:
    code, out, err = bench("--output", str(tmp_path / "result.json"))
    assert code == 0, err
    row = row_of(out)
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == [row]
    assert row["num_ranks"] == 2, "where nothing is said of it"
    assert row["link"]["emulated"]
    assert row["link"]["chosen_to_equal_compute"]
    assert row["link_ms"] == pytest.approx(row["compute_ms"])  # so the bandwidth was chosen; comm_ms is measured
    # 5 sparse layers; a row travels with 4 ids and its transfer's number, and 4 weights; its sum comes back, numbered.
    assert row["bytes_per_step"] == 5 * 64 * ((192 * 4 + 32 + 16) + (192 * 4 + 16))
    off, on = row["off"], row["on"]
    assert (off["steps"], off["split"], on["steps"], on["split"]) == (2, 0, 2, 2)
    for one in (off, on):
        assert one["comm_ms"]["min"] >= row["link_ms"] * 0.99, "a transfer takes as long as the link at least"
    assert off["exposed_ms"]["min"] >= row["link_ms"] * 0.99, "unsplit, all of it is exposed"
    for name in ("EMULATED", "compute", "tokens/s", "split 2/2 steps", "exposed comm"):
        assert name in out
    assert re.search("^same tokens: yes$", out, re.M)


def test_a_given_link_and_a_wrong_answer() -> None:
    """Ubatches joined in the wrong order, as the control: exit code 1."""
    variables = environment_of("swapped:install")
    code, out, _ = bench("--emulate-link-gb-per-s", "0.5", "--emulate-link-latency-us", "100", **variables)
    row = row_of(out)
    assert code == 1
    assert re.search("^same tokens: NO$", out, re.M)
    assert row["link"] == {
        "emulated": True, "gb_per_s": 0.5, "latency_us": 100.0, "chosen_to_equal_compute": False
    }  # fmt: skip
    assert row["off"]["comm_ms"]["min"] >= 10 * 0.1, "two transfers in each of five layers"


def test_overlap_that_cannot_be_off_is_refused() -> None:
    code, _, err = bench(HOCKET_FORCE_SPLIT="2")
    assert code == 2
    assert err.startswith("hocket: ConfigError: HOCKET_FORCE_SPLIT")


def test_where_steps_are_not_split_nothing_is_compared() -> None:
    code, out, _ = bench("--dbo-prefill-token-threshold", "5000")
    assert code == 0
    assert row_of(out)["step_ratio"] is None
    assert "no comparison: not all steps were split" in out
