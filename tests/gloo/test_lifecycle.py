"""How engines begin and end: scripts that never close, what lies in the current directory, Ctrl-C, lost ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo_groups import Groups, poll_to_the_end
from test_launcher import environment, free_port

from hocket.channel.messages import AddRequests
from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import HocketError, RankLost
from hocket.llm import LLM
from hocket.request import SamplingParams

WATCHDOG_S = 90
NO_CLOSE = """
import sys
from hocket import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, data_parallel_size=2, enable_expert_parallel=True)
print(len(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids), flush=True)
"""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run_script(code: str, model: Path, cwd: Path, *, torchrun: bool = False, **env: str) -> subprocess.CompletedProcess:
    script = cwd / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(model)]
    if torchrun:
        ranks = ["--nproc-per-node=2", "--nnodes=1", f"--master-port={free_port()}"]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, str(script), str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, cwd=cwd, env=environment(**env))


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_script_that_never_closes_ends_and_leaves_nothing(
    checkpoints: Callable[..., Path], tmp_path: Path, torchrun: bool
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = run_script(NO_CLOSE, checkpoints("v2"), tmp_path, torchrun=torchrun, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"
    assert "Traceback" not in done.stderr
    assert not list(temporary.glob("hocket-*"))


def test_a_second_llm_under_torchrun_is_refused_in_one_line(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    code = NO_CLOSE + NO_CLOSE.replace("import sys", "llm.close()", 1)
    done = run_script(code, checkpoints("v2"), tmp_path, torchrun=True)
    assert done.returncode != 0
    assert "under torchrun a script can make one LLM" in done.stderr


def test_files_in_the_current_directory_are_not_taken_for_modules(
    checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the module you want')")
    monkeypatch.chdir(tmp_path)
    with LLM(str(checkpoints("v2")), skip_tokenizer_init=True) as llm:
        assert llm.generate([[1, 2]], GREEDY)[0].finished


def test_a_failed_send_leaves_no_trace(
    groups: Groups, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with groups.llm(checkpoints("v2"), 2) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], GREEDY)]
        group = llm.client.group
        send = group.send

        def fails_for_rank_1(rank: int, message: Any) -> None:
            if rank == 1 and isinstance(message, AddRequests):
                raise TypeError("cannot be encoded")
            send(rank, message)

        monkeypatch.setattr(group, "send", fails_for_rank_1)
        with pytest.raises(TypeError, match="cannot be encoded"):
            llm.generate([[5, 6], [7]], GREEDY)
        monkeypatch.undo()
        assert not llm.client.has_unfinished
        assert llm.client.num_requests_per_rank() == [0, 0]
        assert llm.client.processor.num_unfinished == 0
        assert [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], GREEDY)] == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_is_named_while_the_other_goes_on(checkpoints: Callable[..., Path], how: signal.Signals) -> None:
    # One request at a time: rank 0 has more than enough to do until the loss is noticed.
    options = {"skip_tokenizer_init": True, "data_parallel_size": 2, "step_timeout": 0.5, "max_num_seqs": 1}
    with LLM(str(checkpoints("v2")), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        llm.client.add_many([(str(i), [5, 6], params, i % 2) for i in range(40)])
        llm.client.poll(10.0)
        os.kill(llm.client.group.pids[1], how)
        with pytest.raises(RankLost, match="rank 1"):
            poll_to_the_end(llm)
        # Rank 0 still had work: it was not its end that let the loss be seen.
        assert llm.client.num_requests_per_rank()[0] > 0


def test_a_wake_asked_for_before_a_configuration_starts_nobody_early(
    groups: Groups, checkpoints: Callable[..., Path]
) -> None:
    with groups.llm(checkpoints("v2"), 3) as llm:
        expected = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    for _ in range(3):
        with groups.llm(checkpoints("v2"), 3) as llm:
            llm.client.add("left", [5, 6, 7], GREEDY, rank=1)
        with groups.llm(checkpoints("v2"), 3, step_timeout=5.0) as llm:
            assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == expected


def test_ctrl_c_in_the_command_line(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hocket.cli.main", "generate", "--model", str(checkpoints("v2"))]
    command += ["--skip-tokenizer-init", "--prompt-token-ids", "5,6", "--max-tokens", "500", "--ignore-eos"]
    command += ["--n", "64", "--temperature", "1", "--data-parallel-size", "2", "--enable-expert-parallel"]
    # Tests that run in the background have Ctrl-C ignored, which programs inherit.
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stderr is not None
    assert "ready in" in process.stderr.readline()
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.strip() == "hocket: interrupted"
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ctrl_c_in_generate_leaves_a_usable_engine(
    groups: Groups, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with groups.llm(checkpoints("v2"), 2) as llm:
        expected = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        poll, calls = llm.client.poll, iter(range(100))

        def interrupted(timeout_s: float) -> list[Any]:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return poll(timeout_s)

        monkeypatch.setattr(llm.client, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]] * 6, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        monkeypatch.undo()
        assert not llm.client.has_unfinished
        assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == expected


def test_a_stop_string_is_counted_as_a_stop(groups: Groups) -> None:
    with groups.llm("tiny", 2, skip_tokenizer_init=False) as llm:
        llm.stats(reset=True)
        params = SamplingParams(temperature=0, max_tokens=60, stop=["e"], ignore_eos=True)
        outputs = llm.generate(["In the beginning", "The lady"], params)
        assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]
        deadline = time.monotonic() + 20
        while True:  # the ranks are told a moment later
            counts = [rank["requests_finished"] for rank in llm.stats()]
            if sum(count.get("stop", 0) for count in counts) == 2:
                break
            assert time.monotonic() < deadline, counts
        assert not any("abort" in count for count in counts)


def test_a_ranks_error_keeps_its_class(checkpoints: Callable[..., Path]) -> None:
    options = Options(
        model=str(checkpoints("v2")), skip_tokenizer_init=True, kv_cache_memory_bytes=1024, data_parallel_size=2
    )
    group = RankGroup.start(2, 120.0)
    with pytest.raises(HocketError) as caught:
        LLM.from_options(options, group=group)
    assert type(caught.value).__name__ == "CapacityError"
    assert "--kv-cache-memory-bytes" in str(caught.value)
