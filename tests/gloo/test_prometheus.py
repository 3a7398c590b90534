"""The dashboard on a real Prometheus that scrapes a real server: every expression of every panel has a value there.

Needs the program `prometheus` (Debian's package will do), on the path or named by HOCKET_TEST_PROMETHEUS.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("fastapi")
from gloo_groups import Groups
from served import Served
from test_launcher import free_port

from hocket.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = os.environ.get("HOCKET_TEST_PROMETHEUS") or shutil.which("prometheus")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/hocket.json").read_text(encoding="utf-8"))
EXPRESSIONS = {
    f"{panel['title']}: {target['expr']}" for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
}
VARIABLES = {one["name"]: one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"}
SCRAPES = 6
LIMIT_S = 60.0
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here")


class Prometheus:
    """It runs with the configuration of the repository, for a server at `port`, and scrapes each second."""

    def __init__(self, folder: Path, port: int) -> None:
        config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))
        config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        assert PROMETHEUS is not None
        command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"]
        self._process = subprocess.Popen(command, cwd=folder)

    def get(self, path: str, **given: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[float]:
        """The values of all series that it gives now."""
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]

    def wait_until(self, expression: str, least: int) -> None:
        """Until its first value is so large."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert self._process.poll() is None, "prometheus has ended"
            try:
                if self.query(expression) >= [least]:
                    return
            except OSError:  # it is starting
                pass
            assert time.monotonic() < deadline, f"{expression} is not {least}"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def prometheus(groups: Groups, tmp_path: Path) -> Iterator[Prometheus]:
    """Two ranks of which the first splits its steps, under requests with common beginnings until the end."""
    split = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    with groups.llm("tiny", 2, skip_tokenizer_init=False, **split) as llm:
        served = Served(llm, Settings(port=0))
        is_over = threading.Event()
        wrong: list[Any] = []

        def ask() -> None:
            while not is_over.is_set():
                body = {"prompt": "In the beginning God created the heaven and the earth", "max_tokens": 12, "n": 4}
                status, answer = served.post("/v1/completions", body)
                if status != 200:
                    wrong.append(answer)

        clients = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
        for client in clients:
            client.start()
        found = Prometheus(tmp_path, served.port)
        try:
            yield found
        finally:
            found.close()
            is_over.set()
            for client in clients:
                client.join(LIMIT_S)
            served.close()
    assert not wrong


def test_every_expression_of_the_dashboard_has_a_value(prometheus: Prometheus) -> None:
    prometheus.wait_until("count_over_time(up[10m])", SCRAPES)
    prometheus.wait_until("count(hocket:expert_load)", 1)  # from the first scrape on one step in 32 is looked at
    assert prometheus.query("up") == [1.0]
    empty = []
    for titled in sorted(EXPRESSIONS):
        expression = titled.partition(": ")[2].replace("${names}", "hocket").replace("$__rate_interval", "5s")
        values = prometheus.query(expression.replace("$model", ".*").replace("$engine", ".*"))
        if not values or all(math.isnan(value) for value in values):
            empty.append(titled)
    assert not empty, "\n".join(empty)


def test_the_dashboards_variables_have_values(prometheus: Prometheus) -> None:
    """What Grafana asks for `label_values(series, label)`."""
    prometheus.wait_until("count(hocket:steps_total)", 1)
    found = {}
    for name, query in VARIABLES.items():
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        found[name] = prometheus.get(f"label/{label}/values", **{"match[]": series.replace("$model", ".*")})
    assert found == {"model": ["tiny"], "engine": ["0", "1"]}
