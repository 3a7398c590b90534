"""`hocket serve` before it serves: what is wrong is said in one line, and nothing has been loaded by then."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
from hocket.cli.main import main
from hocket.llm import LLM


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also: the command sets up this process's logging."""
    monkeypatch.setattr(LLM, "from_options", None)
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which `hocket serve` refuses these arguments."""
    monkeypatch.setattr("sys.argv", ["hocket", "serve", *arguments])
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("one", "--model", "another"), ("model", "'another'")),
        (("--on-rank-loss", "wait"), ("on_rank_loss", "exit or restart")),
        (("--api-key", " "), ("api_key",)),
        (("--metrics-names", "ours"), ("metrics_names", "hocket, vllm")),
        (("--kv-cache-dtype", "fp8"), ("kv_cache_dtype", "float32")),
        (("--reasoning-parser", "r1"), ("reasoning_parser", "deepseek_r1")),
        (("--tool-call-parser", "qwen"), ("tool_call_parser", "hermes")),
        (("--enable-auto-tool-choice",), ("enable_auto_tool_choice", "--tool-call-parser")),
        (("--profile-dir", "/no/such/folder"), ("profile_dir", "/no/such/folder")),
        (("--data-parallel-external-lb", "--data-parallel-size", "2"), ("data_parallel_rank", "0 to 1")),
        (("--data-parallel-hybrid-lb",), ("data_parallel_size_local", "--data-parallel-hybrid-lb")),
        (("--data-parallel-rank", "1"), ("data_parallel_size", "2 or more")),
        (("--kv-transfer-config", "{}"), ("--kv-transfer-config", "no prefill and decode roles")),
        (("--ssl-certfile", "cert.pem"), ("ssl_certfile", "--ssl-keyfile")),
        (("--host", "no.such.host.invalid"), ("host", "no.such.host.invalid")),
        (("--port", "70000"), ("--port", "65535")),
        (("--port", "-1"), ("--port",)),
        (("--max-concurrent-requests", "0"), ("--max-concurrent-requests",)),
        (("--no-such-option",), ("--no-such-option",)),
        (("--data-parallel-size", "0"), ("data_parallel_size",)),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    line = refusal(monkeypatch, capsys, *arguments)
    assert all(text in line for text in expected), line


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(monkeypatch, capsys, "--port", str(port))
    assert f"port: {port}" in line
    assert "in use" in line


def test_r103_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("hocket.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = refusal(monkeypatch, capsys)
    assert "'uvicorn'" in line
    assert "pip install 'hocket[server]'" in line


def test_the_key_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.server import run

    given = []
    monkeypatch.setenv("HOCKET_API_KEY", "secret")
    monkeypatch.setattr(run, "serve", lambda options, settings, hosts: given.append((options.model, settings.api_keys)))
    monkeypatch.setattr("sys.argv", ["hocket", "serve", "some/model", "--api-key", "other"])
    assert main() == 0
    assert given == [("some/model", ("other", "secret"))]


@pytest.mark.parametrize(("flags", "expected"), [((), True), (("--no-prefix-affinity",), False)])
def test_prefix_affinity_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: bool
) -> None:
    from hocket.server import run

    given = []
    monkeypatch.setattr(run, "serve", lambda options, settings, hosts: given.append(settings.prefix_affinity))
    monkeypatch.setattr("sys.argv", ["hocket", "serve", *flags])
    assert main() == 0
    assert given == [expected]


@pytest.mark.parametrize(
    ("arguments", "model", "names"),
    [
        (("m", "--served-model-name", "a", "b", "--port", "0"), "m", ("a", "b")),
        (("--port", "0", "--enable-dbo", "m", "--served-model-name", "a", "b", "c"), "m", ("a", "b", "c")),
        (("--served-model-name", "a", "b", "--model", "m"), "m", ("a", "b")),
        (("m", "--served-model-name", "a", "--served-model-name", "b", "c"), "m", ("a", "b", "c")),
        (("--port=0", "--served-model-name", "a", "m"), "m", ("a",)),  # the last one is MODEL, which is nowhere else
        (("--served-model-name", "a"), "tiny", ("a",)),
        (("m", "--served-model-name=a"), "m", ("a",)),
    ],
)
def test_a_model_may_have_several_names(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], model: str, names: tuple[str, ...]
) -> None:
    from hocket.server import run

    given = []
    monkeypatch.setattr(
        run, "serve", lambda options, settings, hosts: given.append((options.model, settings.served_model_names))
    )
    monkeypatch.setattr("sys.argv", ["hocket", "serve", *arguments])
    assert main() == 0
    assert given == [(model, names)]


def test_names_without_an_option_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "(b)" in refusal(monkeypatch, capsys, "m", "b", "--served-model-name", "a")
    assert "served_model_name: ''" in refusal(monkeypatch, capsys, "m", "--served-model-name", "--port", "0")
