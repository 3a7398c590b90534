"""Commands of the sample files and of the guide: the parser takes their flags, and their hosts have all ranks once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from hocket.cli.app import app
from hocket.config.hosts import DEFAULT_ADDRESS, HostConfig
from hocket.config.options import Options

ROOT = Path(__file__).resolve().parents[2]
SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
KUBERNETES = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/leaderworkerset.yaml").read_text()))
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yml").read_text())
GUIDE = (ROOT / "docs/many-nodes.md").read_text(encoding="utf-8")


def taken(command: str) -> dict[str, Any]:
    """What the parser makes of `hocket serve …`; a flag that does not exist raises."""
    words = shlex.split(command)
    assert words[:2] == ["hocket", "serve"]
    values: dict[str, Any] = SERVE.make_context("serve", words[2:]).params
    return values


def host_of(values: dict[str, Any]) -> HostConfig:
    """The host of these flags. The engine's options are checked too."""
    names = Options.__dataclass_fields__
    Options.from_dict({name: value for name, value in values.items() if name in names and value is not None})
    found = HostConfig.from_flags(
        values["data_parallel_size"],
        size_local=values["data_parallel_size_local"],
        start_rank=values["data_parallel_start_rank"],
        address=values["data_parallel_address"],
        port=values["data_parallel_rpc_port"],
        headless=values["headless"],
        rank=values["data_parallel_rank"],
        external_lb=values["data_parallel_external_lb"],
        hybrid_lb=values["data_parallel_hybrid_lb"],
    )
    assert found is not None
    return found


def check_group(commands: list[str]) -> list[HostConfig]:
    """These commands are one group: all ranks once, one place to meet, the same engine everywhere, and one server or
    one each, with ports of their own where they are on one machine."""
    values = [taken(command) for command in commands]
    hosts = [host_of(one) for one in values]
    if hosts[0].own_server:
        assert all(host.own_server for host in hosts)
        ports = [one["port"] for one in values]
        assert len(set(ports)) == len(ports) or hosts[0].address != DEFAULT_ADDRESS
    else:
        assert [host.headless for host in hosts] == [False] + [True] * (len(hosts) - 1)
    assert sorted(rank for host in hosts for rank in host.ranks) == list(range(hosts[0].world_size))
    assert len({(host.address, host.port, host.world_size) for host in hosts}) == 1
    engines = [{name: one[name] for name in ("model_name", *Options.__dataclass_fields__)} for one in values]
    assert all(engine == engines[0] for engine in engines)
    return hosts


def run_by_shell(container: dict[str, Any], worker: int, folder: Path) -> str:
    """The `hocket` command line that the container's shell comes to."""
    stand_in = folder / "hocket"
    stand_in.write_text('#!/bin/sh\nfor word in hocket "$@"; do printf "%s\\n" "$word"; done\n')
    stand_in.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "LWS_LEADER_ADDRESS": "leader", "LWS_WORKER_INDEX": str(worker)}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=10)
    return shlex.join(done.stdout.splitlines())


def test_r135_the_leader_worker_set_asks_for_what_its_flags_need(tmp_path: Path) -> None:
    template = KUBERNETES[0]["spec"]["leaderWorkerTemplate"]
    specs = [template["leaderTemplate"]["spec"], *[template["workerTemplate"]["spec"]] * (template["size"] - 1)]
    containers = [spec["containers"][0] for spec in specs]
    hosts = check_group([run_by_shell(one, number, tmp_path) for number, one in enumerate(containers)])
    for host, spec, container in zip(hosts, specs, containers, strict=True):
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == host.num_ranks
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in spec["volumes"]}
    server = taken(run_by_shell(containers[0], 0, tmp_path))
    for probe in ("startupProbe", "readinessProbe"):
        assert containers[0][probe]["httpGet"] == {"path": "/health", "port": server["port"]}
    patience_s = containers[0]["startupProbe"]["periodSeconds"] * containers[0]["startupProbe"]["failureThreshold"]
    assert patience_s > 2 * server["startup_timeout"]  # for the hosts, then for the ranks
    assert all(spec["terminationGracePeriodSeconds"] > server["drain_timeout"] for spec in specs)
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert KUBERNETES[1]["spec"]["selector"] == labels
    assert KUBERNETES[1]["spec"]["ports"][0]["targetPort"] == server["port"]


def test_the_compose_file_is_one_server() -> None:
    services = COMPOSE["services"]
    hosts = check_group([service["command"] for service in services.values()])
    assert hosts[0].address in services  # containers find each other by these names
    port = taken(services["server"]["command"])["port"]
    assert services["server"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert (
        ROOT / "deploy" / services["server"]["build"]["context"] / services["server"]["build"]["dockerfile"]
    ).is_file()


@pytest.mark.parametrize("block", re.findall(r"^```bash\n(.*?)```", GUIDE, re.M | re.S))
def test_r117_commands_of_the_guide_fit_each_other(block: str) -> None:
    commands = [line for line in block.splitlines() if not line.startswith("#")]
    if commands[0].startswith("torchrun"):
        (command,) = commands
        agent, _, command = command.partition(" -m hocket ")
        num_ranks = [int(n) for n in re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", agent)]
        assert taken(f"hocket {command}")["data_parallel_size"] == num_ranks[0] * num_ranks[1]
    else:
        assert len(check_group(commands)) == 2


def test_the_guide_explains_every_flag_for_many_hosts() -> None:
    flags = {option.opts[0] for option in SERVE.params if getattr(option, "rich_help_panel", None) == "Many hosts"}
    assert len(flags) == 8
    assert all(f"`{flag}`" in GUIDE for flag in flags)
