"""`/start_profile` and `/stop_profile`: records steps of what is served, into files. Knows no requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from pathlib import Path
from typing import Any, Literal

from hocket.bench.trace import about
from hocket.channel.messages import Spans
from hocket.errors import RankLost
from hocket.server.async_client import TICK_S, AsyncClient
from hocket.server.errors import ApiError
from hocket.server.served_model import ServedModel
from hocket.trace import page, perfetto
from hocket.trace.recording import recording_of
from hocket.trace.spans import Step

NUM_STEPS, MAX_STEPS = 16, 256
Phase = Literal["any", "prefill", "decode"]
_GRACE_S = 5.0
"""What a rank gets to answer, besides the time that its step may take."""


class Profiler:
    """Has the ranks record steps, and writes them to `folder`; None: the operator wants none."""

    def __init__(self, served: ServedModel, folder: str | None) -> None:
        self._served = served
        self._folder = folder
        self._recording: AsyncClient | None = None
        """The ranks that record: others, started anew, do not."""
        self._numbers = itertools.count(1)

    def start(self, num_steps: int, phase: Phase) -> None:
        """Record the next steps of a phase. What was recorded before is forgotten."""
        if self._folder is None:
            raise ApiError(404, "traces need a server with --profile-dir", code="profile_off")
        self._served.check()
        client = self._served.client
        client.tell(lambda: client.client.record_steps(num_steps, phase="" if phase == "any" else phase))
        self._recording = client

    async def stop(self) -> dict[str, Any]:
        """Write what was recorded since `start`; where it is."""
        self._served.check()
        client, self._recording = self._recording, None
        if client is None or client is not self._served.client:
            raise ApiError(409, "nothing is being recorded: POST /start_profile first", code="profile_off")
        ranks = await self._recorded(client)
        if min(len(steps) for steps in ranks) == 0:
            why = "no step that can be recorded was run on every rank meanwhile (where kernels cannot be profiled, "
            raise ApiError(409, why + "replays of CUDA graphs cannot: --enforce-eager)", code="profile_empty")
        return await asyncio.get_running_loop().run_in_executor(None, self._write, ranks, next(self._numbers))

    async def _recorded(self, client: AsyncClient) -> list[list[Step]]:
        """By rank."""
        found: dict[int, list[Step]] = {}
        is_whole = asyncio.Event()

        def take(message: Spans) -> None:
            found[message.rank] = message.steps
            if len(found) == len(client.client.group.ranks):
                is_whole.set()

        client.client.on_spans = take
        deadline = time.monotonic() + client.client.config.step_timeout_s + _GRACE_S
        try:
            client.tell(client.client.ask_spans)
            while not is_whole.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_whole.wait(), TICK_S)
                if client.lost is not None:
                    raise client.lost
                if time.monotonic() > deadline:
                    missing = ", ".join(str(rank) for rank in client.client.group.ranks if rank not in found)
                    raise RankLost(f"rank {missing} did not report what it recorded")
        finally:
            client.client.on_spans = None
        return [found[rank] for rank in client.client.group.ranks]

    def _write(self, ranks: list[list[Step]], number: int) -> dict[str, Any]:
        """On a thread."""
        assert self._folder is not None
        served, config = self._served, self._served.llm.config
        said = about(served.options, config, "served")
        if first := served.llm.client.group.ranks[0]:
            said["first_rank"] = first
        recording = recording_of(said, ranks, moves=config.parallel.enable_expert_parallel)
        name = f"profile-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{number}"
        html, events = (Path(self._folder, f"{name}.{ending}") for ending in ("html", "json"))
        page.write({"": recording}, html)
        perfetto.write(recording, events)
        return {"status": "written", "num_steps": len(recording.ranks[0]), "page": str(html), "events": str(events)}
