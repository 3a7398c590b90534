"""`hocket serve` on two hosts: network namespaces where this user may make them, else two addresses of this host."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from commands import LIMIT_S, Command
from test_launcher import ROOT, free_port
from test_lifecycle import children_of

pytest.importorskip("fastapi")
ENGINE = ("--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo", "--startup-timeout", "60")
SPLIT = ("--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2")
CLIENT = (
    "import sys, urllib.request as u; print(u.urlopen(u.Request(*sys.argv[1:2], data=sys.argv[2].encode() or None, \
headers={'content-type': 'application/json'}), timeout=60).read().decode())"
)


@dataclass
class Network:
    """Two hosts: what goes before a command on each, and the first one's address."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    address: str
    commands: list[Command] = field(default_factory=list)

    def start(self, host: int, *arguments: str, module: tuple[str, ...] = ("-m", "hocket")) -> Command:
        """Run Python there; gloo is not told which interface to take."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env.pop("GLOO_SOCKET_IFNAME", None)
        self.commands.append(Command([*self.prefixes[host], sys.executable, *module, *arguments], env))
        return self.commands[-1]

    def get(self, host: int, port: int, path: str, body: Any = None) -> str:
        """What the first host's server answers to the other."""
        data = json.dumps(body) if body is not None else ""
        command = [*self.prefixes[host], sys.executable, "-c", CLIENT, f"http://{self.address}:{port}{path}", data]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    names = [f"hocket-{os.getpid()}-{side}" for side in "ab"]
    links = [f"hk{os.getpid() % 10**7}{side}" for side in "ab"]
    network = Network(((), ()), "127.0.0.2")
    try:
        if shutil.which("ip") and os.geteuid() == 0:
            for name in names:
                run_ip("netns", "add", name)
                run_ip("-n", name, "link", "set", "lo", "up")
            ends = "type", "veth", "peer", "name", links[1], "netns", names[1]
            run_ip("link", "add", links[0], "netns", names[0], *ends)
            for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
                run_ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
                run_ip("-n", name, "link", "set", link, "up")
            enter = [("ip", "netns", "exec", name) for name in names]
            network = Network((enter[0], enter[1]), "10.77.0.1")
    except subprocess.CalledProcessError:  # a container that may not: two addresses then
        pass
    yield network
    for command in network.commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()
        command._reader.join(LIMIT_S)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S, check=False)


def one_command_each(hosts: Network, *arguments: str) -> tuple[Command, Command, int]:
    """The server's and the other host's, when they serve, and the port."""
    meet = "--data-parallel-size-local", "1", "--data-parallel-address", hosts.address
    meet += "--data-parallel-rpc-port", str(free_port())
    here = hosts.start(0, "serve", "tiny", "--port", "0", "--host", hosts.address, *ENGINE, *SPLIT, *meet, *arguments)
    there = hosts.start(1, "serve", "tiny", *ENGINE, *SPLIT, *meet, "--headless", "--data-parallel-start-rank", "1")
    return here, there, port_of(here)


def port_of(server: Command) -> int:
    return int(re.findall(r"http://[\d.]+:(\d+) ", server.wait_for("serving at"))[0])


def complete(hosts: Network, port: int) -> list[str]:
    """Four greedy answers, asked for from the other host."""
    prompts = ["In the beginning", "The lady was", "One day", "He said"]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return [choice["text"] for choice in json.loads(hosts.get(1, port, "/v1/completions", body))["choices"]]


def num_split(hosts: Network, port: int) -> list[float]:
    """Steps in ubatches, by rank."""
    text = hosts.get(1, port, "/metrics")
    return [
        sum(
            float(n)
            for n in re.findall(rf'^\w+:overlap_steps_total{{engine="{rank}".*reason="split"}} (\S+)', text, re.M)
        )
        for rank in range(2)
    ]


def test_r115_one_command_per_host_and_a_rank_that_is_killed(hosts: Network) -> None:
    """Nobody tells gloo which interface leads to the other host; the lost rank is named on both."""
    here, there, port = one_command_each(hosts)
    there.wait_for("rank 1 started for the server")
    assert all(complete(hosts, port))
    assert all(count > 0 for count in num_split(hosts, port))
    (rank,) = children_of(there.process.pid)
    os.kill(rank, signal.SIGKILL)
    assert here.ended() == there.ended() == 1
    assert "RankLost: rank 1 ended unexpectedly" in here.lines[-1]
    assert "killed by signal 9" in here.lines[-1]
    assert "rank 1 ended unexpectedly" in there.lines[-1]
    assert not any("Traceback" in line for line in here.lines + there.lines)


def test_both_hosts_end_with_the_server(hosts: Network) -> None:
    here, there, port = one_command_each(hosts)
    there.process.send_signal(signal.SIGTERM)
    there.wait_for("SIGTERM: ranks here end with the server")
    assert all(complete(hosts, port))  # the server decides, and still has its rank
    ranks = children_of(here.process.pid) + children_of(there.process.pid)
    assert len(ranks) == 2
    here.process.send_signal(signal.SIGTERM)
    assert here.ended() == there.ended() == 0
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_torchrun_on_two_hosts(hosts: Network) -> None:
    meet = "--nnodes=2", "--nproc-per-node=1", f"--master-addr={hosts.address}", f"--master-port={free_port()}"
    serve = "-m", "hocket", "serve", "tiny", "--port", "0", "--host", hosts.address, *ENGINE, *SPLIT
    module = "-m", "torch.distributed.run"
    agents = [hosts.start(n, f"--node-rank={n}", *meet, *serve, module=module) for n in range(2)]
    port = port_of(agents[0])
    assert all(complete(hosts, port))
    assert all(count > 0 for count in num_split(hosts, port))
    (server,) = [pid for pid in children_of(agents[0].process.pid) if children_of(pid)]
    os.kill(server, signal.SIGTERM)
    assert [agent.ended() for agent in agents] == [0, 0]
