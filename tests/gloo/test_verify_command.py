"""`hocket verify` agrees where all is well, and finds planted faults: exit code 1, and where they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faulty import faulty_groups
from gloo_groups import Groups
from model_faults import LAYER

from hocket.cli import app
from hocket.config.options import Options
from hocket.llm import LLM
from hocket.verify import run as verify_run

ROOT = Path(__file__).resolve().parents[2]
BEHIND = "the fault is behind the last one"


def report_of(out: str) -> dict[str, Any]:
    return dict(json.loads(out.splitlines()[-1]))


# -- all is well ----------------------------------------------------------------------------------------------------


def test_tiny_agrees_in_every_configuration_and_after_a_restart(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hocket.cli.main", "verify", "--model", "tiny"]
    command += ["--output-len", "4", "--output", str(tmp_path / "result.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = report_of(done.stdout)
    assert json.loads((tmp_path / "result.json").read_text()) == report
    gather, torch = "allgather_reducescatter", "torch"
    assert [(row["num_ubatches"], row["transport"], row["is_restarted"]) for row in report["rows"]] == [
        *((size, transport, False) for transport in (gather, torch) for size in (1, 2, 3)),
        (1, gather, True),
        (2, gather, True),
    ]
    pids = [row["pids"] for row in report["rows"]]
    assert pids[:6] == [pids[0]] * 6
    assert pids[6] == pids[7]
    assert not {*pids[0]} & {*pids[7]}
    assert [len(one) for one in pids] == [2] * 8
    assert report["not_exercised"] == report["problems"] == report["skipped"] == []
    for row in report["rows"]:
        comparison, splits = row["comparison"], row["splits"]
        assert comparison["num_same_tokens"] == comparison["num_tokens"] == 12 * 4 - comparison["num_ties"]
        assert comparison["largest_logprob_difference"] < 1e-4
        assert all(splits["steps"][phase] > 0 for phase in ("prefill", "mixed", "decode"))
        for phase, number in splits["split"].items():
            assert (number > 0) == (row["num_ubatches"] > 1), phase
    for what in ("thresholds are lowered", "tokens must be equal", "✓ 8 configurations gave the same answers"):
        assert what in done.stdout


# -- planted faults -------------------------------------------------------------------------------------------------


class LongLived(verify_run.Ranks):
    """Ranks that outlive a verification, so that each of many starts none; they plant what the file names."""

    groups: Groups

    def llm(self, options: Options) -> LLM:
        return LLM.from_options(options, group=self.groups.get(options.data_parallel_size))

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Command:
    """`hocket verify` in this process, on ranks with a fault."""

    file: Path
    capture: pytest.CaptureFixture[str]
    patched: pytest.MonkeyPatch
    model: Path

    def __call__(self, fault: str, *flags: str) -> tuple[int, str]:
        self.file.write_text(fault)
        fixed = ["--model", str(self.model), "--all2all-backend", "torch", "--output-len", "4"]
        self.patched.setattr(sys, "argv", ["hocket", "verify", *fixed, *flags])
        code = app.run()
        out, err = self.capture.readouterr()
        print(out)  # shown if the test fails
        assert err == ""
        return code, out


@pytest.fixture(scope="module")
def faulty(fault_file: Path) -> Iterator[Groups]:
    with faulty_groups("verify_faults:install", fault_file) as made:
        yield made


@pytest.fixture
def command(
    fault_file: Path,
    faulty: Groups,
    checkpoints: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    monkeypatch.setattr(LongLived, "groups", faulty, raising=False)
    monkeypatch.setattr(verify_run, "Ranks", LongLived)
    return Command(fault_file, capsys, monkeypatch, checkpoints("v2"))


FOUND = {
    "results in another order": BEHIND,
    "one workspace in one layer": f"layer {LAYER}, MLP or experts, ubatch 0",
    "seq_lens not corrected": "layer 0, attention, ubatch 0",
    "reader before writer": "layer 0, attention, ubatch 0",
    "weights applied twice in one layer": f"layer {LAYER}, MLP or experts, ubatch 0",
}


def test_without_a_fault_nothing_is_found(command: Command) -> None:
    code, out = command("", "--bisect")
    assert code == 0
    assert out.count("hidden states of all 4 layers agree") == 4
    assert "✗" not in out


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found_and_where_it_is(command: Command, fault: str) -> None:
    code, out = command(fault, "--bisect")
    assert code == 1
    report = report_of(out)
    wrong = [row for row in report["rows"] if row["problem"]]
    assert len(report["problems"]) == len(wrong)
    assert all(row["num_ubatches"] > 1 for row in wrong), "without overlap these faults do nothing"
    two = next(row for row in wrong if row["num_ubatches"] == 2)
    assert two["problem"] == "other answers"
    hint = re.search(rf"^{re.escape(two['name'])}: other answers\n(.*\n)(.*)\n", out, re.M)
    assert hint, out
    where = r"  request \d+, token \d+: \d+ \(-[\d.]+\)"
    assert re.match(rf"{where}( instead of \d+ \(-|, log-probabilities differ by)", hint[1])
    assert FOUND[fault] in hint[2]


def test_half_precision_allows_one_token_much_but_not_all_a_little(command: Command) -> None:
    code, out = command("", "--dtype", "bfloat16")
    assert code == 0
    report = report_of(out)
    _, reversed_, *others = report["rows"]
    assert reversed_["name"].endswith("prompts reversed")
    noise = reversed_["comparison"]["usual_difference"]
    assert report["rules"]["usual"] == pytest.approx(max(2 * noise, 8 / 128))
    assert {row["num_ubatches"] for row in others} == {1, 2, 3}
    code, out = command("weights a little larger in one layer", "--dtype", "bfloat16")
    assert code == 1
    report = report_of(out)
    wrong = [row for row in report["rows"] if row["problem"]]
    assert [row["num_ubatches"] for row in wrong] == [2, 3, 2]
    for row in wrong:
        comparison = row["comparison"]
        assert comparison["first"] is None, "each token alone is within what one may differ"
        assert row["problem"] == "answers drift"
        assert comparison["num_unusual"] > 0.2 * comparison["num_compared"]
    assert "tokens have a log-probability that differs by over" in out


def test_steps_that_were_not_split_verify_nothing(command: Command) -> None:
    code, out = command("never split")
    assert code == 1
    rows = report_of(out)["rows"]
    assert [row["problem"] is None for row in rows] == [row["num_ubatches"] == 1 for row in rows]
    for row in rows:
        if row["num_ubatches"] > 1:
            assert row["comparison"]["first"] is None
            steps = row["splits"]["steps"]
            assert row["problem"].startswith(
                f"not a verification: no prefill step of {steps['prefill']} was split (disabled {steps['prefill']})"
            )
            assert row["problem"] in out


def test_an_engine_that_fails_is_a_result_and_the_rest_is_still_compared(command: Command) -> None:
    code, out = command("the second ubatch raises")
    assert code == 1
    rows = report_of(out)["rows"]
    assert [(row["problem"] or "").partition(":")[0] for row in rows] == [
        "", "UBatchFailed", "UBatchFailed", "", "UBatchFailed"
    ]  # fmt: skip


def test_deterministic_demands_equal_bits(command: Command) -> None:
    code, out = command("", "--deterministic", "--bisect")
    assert code == 0
    report = report_of(out)
    assert report["rules"]["exact"]
    for row in report["rows"]:
        assert row["comparison"]["largest_logprob_difference"] == 0
        assert row["bisection"] is None or row["bisection"]["largest"] == 0
    code, out = command("weights applied twice in one layer", "--deterministic", "--bisect")
    assert code == 1
    assert f"layer {LAYER}, MLP or experts, ubatch 0" in out


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-enable-expert-parallel",),
        ("--data-parallel-size", "1"),
        ("--num-prompts", "1"),
        ("--deterministic", "--tolerance", "0.1"),
        ("--prompts-file", "no-such-file"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["hocket", "verify", *flags])
    assert app.run() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
