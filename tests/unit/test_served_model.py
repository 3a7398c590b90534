"""What becomes of a served model when a rank is lost: started anew, with what is waited for, and not while it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fake_ranks import FakeGroup

from hocket.config.options import Options
from hocket.errors import ConfigError, HocketError
from hocket.llm import LLM
from hocket.server.served_model import ServedModel

OPTIONS = Options(data_parallel_size=2, enable_expert_parallel=True)
LIMIT_S = 20.0


def loaded() -> tuple[LLM, FakeGroup]:
    group = FakeGroup(lambda request: [])
    ranks: Any = group
    return LLM.from_options(OPTIONS, group=ranks), group


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_ending", [False, True])
def test_what_a_restart_waits_for_is_said_and_it_yields_to_the_end(
    monkeypatch: pytest.MonkeyPatch, is_ending: bool
) -> None:
    (first, group), (second, _) = loaded(), loaded()
    may_go_on = threading.Event()
    closed: list[LLM] = []
    ended: list[HocketError] = []

    def from_options(options: Options, *, on_wait: Callable[[str], None], **_: Any) -> LLM:
        on_wait("waiting for rank 1 to start")
        assert may_go_on.wait(LIMIT_S)
        on_wait("waiting for rank 1 to load")
        return second

    async def main() -> None:
        model = ServedModel(first, OPTIONS, restart=True, on_end=ended.append)
        group.lose("rank 1 ended unexpectedly")
        waited = "RankLost: rank 1 ended unexpectedly; all ranks are being started anew: waiting for rank 1 to start"
        await until(lambda: model.problem == waited)
        if is_ending:
            model.drain()
        may_go_on.set()
        await until(lambda: bool(closed) or model.problem is None)
        assert (closed, model.num_restarts) == (([second], 0) if is_ending else ([], 1))
        assert model.problem == (waited if is_ending else None)
        model.close()

    monkeypatch.setattr(LLM, "from_options", from_options)
    monkeypatch.setattr(second, "close", lambda: closed.append(second))
    asyncio.run(main())
    assert not ended


def test_a_rank_lost_while_the_server_ends_starts_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first, group = loaded()
    ended: list[HocketError] = []

    async def main() -> None:
        model = ServedModel(first, OPTIONS, restart=True, on_end=ended.append)
        model.drain()
        assert model.problem == "the server is shutting down"
        group.lose("rank 1 ended unexpectedly")
        await until(lambda: bool(ended))
        model.close()

    monkeypatch.delattr(LLM, "from_options")
    asyncio.run(main())
    assert [str(error) for error in ended] == ["rank 1 ended unexpectedly"]


@pytest.mark.parametrize(("given", "says"), [("/nowhere.jinja", "a readable file"), ("{% if %}", "valid Jinja")])
def test_a_wrong_chat_template_is_said_before_ranks_start(given: str, says: str) -> None:
    group: Any = FakeGroup(lambda request: [])
    with pytest.raises(ConfigError, match=rf"^chat_template: .* is not allowed; allowed: {says}"):
        LLM.from_options(replace(OPTIONS, chat_template=given), group=group)
