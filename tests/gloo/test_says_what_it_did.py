"""Every step is counted and logged with its reason, on every rank and in every situation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import greedy, settled_stats
from counters import assert_add_up, reasons_of
from gloo_groups import Groups
from patched_ranks import environment_of, patched_ranks
from planted_steps import PLANT_FILE

from hocket.config.options import Options
from hocket.errors import UBatchFailed
from hocket.llm import LLM

Checkpoints = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[2]
ON = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}
PROMPTS = [[5 + i, 6, 7, 8 + i] for i in range(9)]


def run_and_abort(llm: LLM) -> None:
    """Two answers that are long, one of which is dropped on its way."""
    llm.client.add_many([(f"abort-{i}", PROMPTS[i], greedy(60), i % 2) for i in range(4)])
    lengths: dict[str, int] = {}
    while not lengths or min(lengths.values()) < 5:
        lengths |= {result.request_id: len(result.outputs[0].token_ids) for result in llm.client.poll(20.0)}
    llm.client.abort(["abort-1", "abort-2"])
    while llm.client.has_unfinished:
        llm.client.poll(20.0)


@pytest.mark.parametrize("num_ubatches", [1, 2, 3])
def test_counters_add_up_on_every_rank(groups: Groups, checkpoints: Checkpoints, num_ubatches: int) -> None:
    """Ranks alike, uneven and idle; waves that end; requests aborted in the middle; counters set back in between."""
    on = {**ON, "enable_dbo": False, "ubatch_size": num_ubatches, "dbo_decode_token_threshold": num_ubatches}
    with groups.llm(checkpoints("v2"), 3, **(on if num_ubatches > 1 else {})) as llm:
        seen: Counter[str] = Counter()
        for ranks in ([0, 1, 2] * 3, [0, 0, 0, 1], [2], [1, 1, 1, 1]):
            llm.generate(PROMPTS[: len(ranks)], greedy(5), data_parallel_rank=ranks)
            seen += assert_add_up(settled_stats(llm, reset=True), num_ubatches)
        run_and_abort(llm)
        seen += assert_add_up(settled_stats(llm), num_ubatches)
    assert set(seen) == ({"disabled"} if num_ubatches == 1 else {"split", "below_threshold", "no_work"})


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_and_dropped_steps_are_counted_alike(tmp_path: Path, checkpoints: Checkpoints, overlap: bool) -> None:
    """A step that fails keeps its reason; the one scheduled on top of it is `step_dropped`, on all ranks."""
    plant_file, num_ranks = tmp_path / "where", 3
    wide = {"data_parallel_size": num_ranks, "enable_expert_parallel": True, "skip_tokenizer_init": True}
    options = Options.from_dict(
        {"model": str(checkpoints("v2")), "step_timeout": 20.0, **wide, **(ON if overlap else {})}
    )
    with (
        patched_ranks(num_ranks, "planted_steps:install", **{PLANT_FILE: str(plant_file)}) as group,
        LLM.from_options(options, group=group) as llm,
    ):
        for count, where in enumerate(("0 0 experts", "2 0 attention", "1 0 router"), 1):
            plant_file.write_text(f"{where} raise")
            # Rank 2 has no request: where it is the one to fail, it fails without any.
            with pytest.raises(UBatchFailed, match=f"failed on rank {where[0]}"):
                llm.generate(PROMPTS[:8], greedy(12), data_parallel_rank=[0, 1] * 4)
            llm.generate(PROMPTS[:8], greedy(3), data_parallel_rank=[0, 1] * 4)
            ranks = settled_stats(llm)
            found = assert_add_up(ranks, 2 if overlap else 1)
            assert [rank["failed"] for rank in ranks] == [count] * num_ranks
            assert found["step_dropped"] == count
            assert found["split" if overlap else "disabled"] > 2 * count


def command(*args: str, level: str = "WARNING", **variables: str) -> tuple[str, str]:
    """Standard output and error of `hocket generate` with two ranks and overlap."""
    wide = ("--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo", "--temperature", "0")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOCKET_LOG_LEVEL": level, **variables}
    done = subprocess.run(
        [sys.executable, "-m", "hocket.cli.main", "generate", *wide, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_log_and_the_report_say_the_same(checkpoints: Checkpoints) -> None:
    """`generate --json` has each rank's counters, and the debug log a line for each of those steps."""
    texts = ("In the beginning", "The lady was not", "And it came to pass", "It is", "He")
    prompts = [part for text in texts for part in ("--prompt", text)]
    thresholds = ("--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "4")
    out, err = command(*prompts, *thresholds, "--max-tokens", "7", "--ignore-eos", "--json", level="DEBUG")
    ranks = json.loads(out)["ranks"]
    reasons: dict[int, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    sizes: dict[int, Counter[str]] = defaultdict(Counter)
    numbers: dict[int, list[int]] = defaultdict(list)
    form = r"hocket rank (\d): DEBUG: step (\d+): (\w+), (\w+)(?:, tokens ([\d: ]+) of padded ([\d: ]+), eager)?"
    for rank, step, phase, reason, real, padded in re.findall(form, err):
        reasons[int(rank)][phase][reason] += 1
        numbers[int(rank)].append(int(step))
        if reason == "split":
            parts = [[int(end) for end in part.split(":")] for part in real.split()]
            sizes[int(rank)]["+".join(str(stop - start) for start, stop in parts)] += 1
            assert padded.count(":") == 2
    assert len(ranks) == 2
    for i, rank in enumerate(ranks):
        # The last steps, which find no work, may come after the report.
        assert numbers[i] == list(range(len(numbers[i])))
        assert {phase: by for phase, by in rank["overlap"]["reasons"].items() if phase != "idle"} == {
            phase: dict(by) for phase, by in reasons[i].items() if phase != "idle"
        }
        assert rank["overlap"]["ubatch_tokens"] == dict(sizes[i])
        assert reasons_of(rank)["split"] >= 6
        assert len(re.findall(rf"hocket rank {i}: INFO: .*; overlap: split \d+/\d+ steps .* ms/step", err)) >= 1
    assert "WARNING" not in err


def test_a_line_per_interval_while_there_is_work() -> None:
    """Over a link so slow that a run lasts several intervals of a second. All lines of a rank together are its
    counters: no step is left out, none is said twice."""
    slow = ("--emulate-link-gb-per-s", "1", "--emulate-link-latency-us", "20000")
    prompt = "It is a truth universally acknowledged, that a single man in possession of a good fortune must be"
    prompts = [part for _ in range(4) for part in ("--prompt", prompt)]
    thresholds = ("--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2")
    asked = (*prompts, *thresholds, *slow, "--max-tokens", "16", "--ignore-eos", "--json")
    out, err = command(*asked, level="INFO", HOCKET_LOG_INTERVAL="1")
    for i, rank in enumerate(json.loads(out)["ranks"]):
        lines = [line for line in err.splitlines() if line.startswith(f"hocket rank {i}: INFO: up to ")]
        form = (
            r"up to (\d+) requests running, \d+ waiting; (\d+) prompt \+ (\d+) generated tokens/s; "
            r"KV cache up to [\d.]+%; prefix hits (?:([\d.]+)% of (\d+) tokens|none looked up); "
            r"overlap: split (\d+)/\d+ steps(?: \(.*\))?, exposed comm ([\d.]+) of ([\d.]+) ms/step$"
        )
        found = [match.groups() for line in lines if (match := re.search(form, line))]
        assert len(found) == len(lines) >= 3, lines
        assert sum(int(split) for *_, split, _, _ in found) == rank["overlap"]["split"] >= 16
        first, later = found[0], found[1]
        assert first[0] == later[0] == "2"
        assert int(first[1]) > 0
        assert (later[1], later[4]) == ("0", None), "no prompt was computed or looked up any more"
        assert int(later[2]) > 0
        assert float(first[3]) > 0, "the second prompt is the first one again"
        for *_, exposed, total in found[:2]:
            assert 0 < float(exposed) <= float(total)
            assert float(total) > 10 * 20, "ten transfers a step at 20 ms, for each ubatch"


def test_the_plain_text_says_it_and_a_vain_overlap_is_warned_of_once() -> None:
    out, err = command("--prompt", "In the beginning", "--max-tokens", "4")
    assert re.search(
        r"^overlap: split 0/\d+ steps \(below_threshold 4.*\), exposed comm .* ms/step \(on rank 0\)$", out, re.M
    )
    warnings = [line for line in err.splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert "hocket rank 0: WARNING: overlap is on, but no step of 4 was split (below_threshold 4)" in warnings[0]
    assert "--dbo-prefill-token-threshold is 512" in warnings[0]
    out, err = command(
        "--prompt", "In", "--max-tokens", "3", "--dbo-prefill-token-threshold", "2", "--prompt", "In the"
    )
    assert "overlap: split 1/" in out
    assert "WARNING" not in err


def test_r087_steps_that_are_never_split_are_warned_of_while_they_run() -> None:
    """After 20 steps here; decodes only, prefills having been split."""
    prompts = ("--prompt", "In the beginning", "--prompt", "It came to pass", "--max-tokens", "45", "--ignore-eos")
    _, err = command(*prompts, "--dbo-prefill-token-threshold", "2", **environment_of("counters:warn_soon"))
    (warning,) = [line for line in err.splitlines() if "WARNING" in line]
    assert "hocket rank 0: WARNING: overlap is on, but none of the first 20 decode steps was split" in warning
    assert "(below_threshold 20): --dbo-decode-token-threshold is 32" in warning
    assert "prefill" not in warning
