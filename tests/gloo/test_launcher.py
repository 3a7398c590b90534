"""Starting ranks: under torchrun on one host and on two, a rank that never comes, a second engine, clean ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gloo_groups import Groups

from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import CheckpointError, RankLost
from hocket.llm import LLM
from hocket.request import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, sys
from hocket import LLM, SamplingParams
with LLM(sys.argv[1], skip_tokenizer_init=True, data_parallel_size=2, enable_expert_parallel=True,
         startup_timeout=float(sys.argv[2])) as llm:
    outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    print("RESULT", json.dumps([o.outputs[0].token_ids for o in outputs]), flush=True)
"""
WATCHDOG_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**values: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | values


def torchrun(folder: Path, model: Path, nodes: int, node: int, port: int) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"]
    command += [
        f"--node-rank={node}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        str(script),
        str(model),
        "60",
    ]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )


def greedy(groups: Groups, model: Path) -> list[list[int]]:
    with groups.llm(model, 1) as llm:
        outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun(groups: Groups, checkpoints: Callable[..., Path], tmp_path: Path, nodes: int) -> None:
    model = checkpoints("v2")
    port = free_port()
    agents = [torchrun(tmp_path, model, nodes, node, port) for node in range(nodes)]
    outputs = [agent.communicate(timeout=WATCHDOG_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * nodes, "\n".join(outputs)
    found = [line for line in outputs[0].splitlines() if line.startswith("RESULT")]
    assert json.loads(found[0].removeprefix("RESULT ")) == greedy(groups, model)


def test_a_rank_that_never_comes_is_named(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = environment(
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    started = time.monotonic()
    command = [sys.executable, str(script), str(checkpoints("v2")), "8"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WATCHDOG_S, cwd=tmp_path)
    assert done.returncode != 0
    assert "RankLost: rank 1 did not start within 8 s" in done.stderr
    assert time.monotonic() - started < 40


def test_a_failed_load_is_the_error_the_user_sees(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    (tmp_path / "config.json").write_text((checkpoints("v2") / "config.json").read_text())
    group = RankGroup.start(2, 120.0)
    options = Options(model=str(tmp_path), skip_tokenizer_init=True, data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM.from_options(options, group=group)
    assert group.closed
    assert not [pid for pid in group.pids.values() if Path(f"/proc/{pid}").exists()]


def test_nothing_is_left_after_close(checkpoints: Callable[..., Path]) -> None:
    with LLM(str(checkpoints("v2")), skip_tokenizer_init=True, data_parallel_size=2) as llm:
        assert llm._group is not None
        pids = list(llm._group.pids.values())
        assert len(pids) == 2
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    llm.close()  # may be called again


def test_ranks_end_when_the_front_is_killed(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    code = (
        "import sys, time; from hocket import LLM\n"
        "llm = LLM(sys.argv[1], skip_tokenizer_init=True, data_parallel_size=2, enable_expert_parallel=True)\n"
        "print(*llm._group.pids.values(), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(checkpoints("v2"))]
    front = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert front.stdout is not None
    pids = [int(pid) for pid in front.stdout.readline().split()]
    assert len(pids) == 2
    front.kill()
    front.wait()
    front.stdout.close()
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"ranks outlive their front: {alive}"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_start_up_names_the_limit() -> None:
    with pytest.raises(RankLost, match=r"rank 0, 1 did not start within 0\.05 s"):
        RankGroup.start(2, 0.05)
