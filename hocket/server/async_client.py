"""The engine's client on an event loop: many callers, each waiting for its own requests. Knows nothing of HTTP.

One thread does all: the loop watches the channel to the ranks, what came is given to who waits for it. Nobody is ever
waited for: who reads slowly finds more at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hocket.client import EngineClient, FailedStep
from hocket.errors import HocketError, UBatchFailed, revive
from hocket.outputs import RequestOutput
from hocket.request import SamplingParams

logger = logging.getLogger(__name__)
TICK_S = 0.2
"""How often ranks are looked at that say nothing."""
Item = tuple[str, Any, SamplingParams | None, int | None]
"""Request id, prompt, sampling parameters (None: the model's), rank (None: the one with the least to do)."""


class Closed(Exception):
    """Nobody wants these results any more."""


class Results:
    """What the requests submitted together gain: `async for position, output in results`.

    position: of the request among those submitted. output: it so far, the same object each time; it ends with all of
    them finished. Several changes between two turns are one; `whole`: only finished requests are told. Close it when
    done: what is unfinished is aborted.

    Raises:
        HocketError: the step of one of the requests failed, or the engine is lost. Closed: `close` was called.
    """

    def __init__(self, client: AsyncClient, request_ids: Sequence[str], *, whole: bool = False) -> None:
        self.answer_id = request_ids[0]
        self._client = client
        self._whole = whole
        self._open = {request_id: position for position, request_id in enumerate(request_ids)}
        self._changed: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._event = asyncio.Event()

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while not self._changed:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()
        position = next(iter(self._changed))
        return position, self._changed.pop(position)

    def put(self, output: RequestOutput) -> None:
        """For the client: a request has changed."""
        if self._whole and not output.finished:
            return
        position = self._open.pop(output.request_id) if output.finished else self._open[output.request_id]
        self._changed[position] = output
        self._event.set()

    def fail(self, error: Exception) -> None:
        """For the client: there will be no more."""
        self._error = self._error or error
        self._changed.clear()
        self._event.set()

    def close(self) -> None:
        """Abort what is unfinished; who waits gets Closed. May be called again."""
        unfinished, self._open = list(self._open), {}
        if unfinished:
            self.fail(Closed())
            self._client.forget(unfinished)

    @property
    def request_ids(self) -> list[str]:
        """Those not finished yet."""
        return list(self._open)


class AsyncClient:
    """An EngineClient whose requests are waited for on the running loop. Make it and use it there only.

    on_lost: called once, when the ranks are gone; every request has got the error by then.
    """

    def __init__(self, client: EngineClient, on_lost: Callable[[HocketError], None]) -> None:
        self.client = client
        self.lost: HocketError | None = None
        self.num_finished = 0
        """Requests that ended by themselves."""
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._results: dict[str, Results] = {}
        self._fds = client.group.filenos()
        for fd in self._fds:
            self._loop.add_reader(fd, self._pump)
        self._timer = self._loop.call_later(TICK_S, self._tick)

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._results)

    def submit(self, items: Sequence[Item], *, whole: bool = False) -> Results:
        """Queue requests; all or none.

        Raises:
            ConfigError, CapacityError: one of them cannot be served. HocketError: the engine is lost.
        """
        if self.lost is not None:
            raise revive(type(self.lost).__name__, str(self.lost))
        results = Results(self, [request_id for request_id, *_ in items], whole=whole)
        try:
            self.client.add_many(items)
        except HocketError as error:
            self._note_loss(error)
            raise
        self._results |= dict.fromkeys(results.request_ids, results)
        self._look_again()
        return results

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests: they finish with the reason "abort". Returns the ids that were in flight."""
        found = [request_id for request_id in request_ids if request_id in self._results]
        outputs = [output for request_id in found if (output := self.client.processor.output_of(request_id))]
        self._tell_abort(found)
        self._deliver(outputs)
        return found

    def abort_answers(self, answer_ids: Iterable[str]) -> list[str]:
        """As `abort`, with all that was submitted together, by the first one's id."""
        wanted = set(answer_ids)
        return self.abort([i for i, results in self._results.items() if results.answer_id in wanted])

    def abort_all(self) -> list[str]:
        """End every request."""
        return self.abort(list(self._results))

    def fail_all(self, error: HocketError) -> None:
        """End every request with an error."""
        results, self._results = self._results, {}
        if self.lost is None:
            self._tell_abort(results)
        for result in results.values():
            result.fail(error)

    def ask_counters(self) -> None:
        """As `EngineClient.ask_counters`. Raises HocketError where the ranks are gone."""
        self.tell(self.client.ask_counters)

    def tell(self, send: Callable[[], None]) -> None:
        """Send something to the ranks by the EngineClient. Raises HocketError where they are gone."""
        if self.lost is not None:
            raise revive(type(self.lost).__name__, str(self.lost))
        try:
            send()
        except HocketError as error:
            self._note_loss(error)
            raise
        self._look_again()

    def forget(self, request_ids: Sequence[str]) -> None:
        """For Results: nobody waits for these any more."""
        known = [request_id for request_id in request_ids if self._results.pop(request_id, None) is not None]
        if known and self.lost is None:
            self._tell_abort(known)

    def close(self) -> None:
        """Watch the channel no more. The ranks are left as they are. May be called again."""
        self._timer.cancel()
        while self._fds:  # afterwards the numbers may be others'
            self._loop.remove_reader(self._fds.pop())

    def _tell_abort(self, request_ids: Iterable[str]) -> None:
        try:
            self.client.abort(request_ids)
        except HocketError as error:
            if not self._note_loss(error):
                raise
        else:
            self._look_again()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._pump()

    def _pump(self) -> None:
        """Take what the ranks have said."""
        if self.lost is not None:
            return
        try:
            changed, failed = self.client.advance(0.0)
            for step in failed:
                self._fail(step)
            self._deliver(changed)
            self._look_again()
        except Exception as error:  # nobody above would learn of it, and all who wait would wait for ever
            if isinstance(error, HocketError) and self._note_loss(error):
                return
            logger.exception("what the ranks said could not be taken")
            self.client.group.kill()
            self._note_loss(HocketError(f"the front failed: {type(error).__name__}: {error}"))

    def _look_again(self) -> None:
        """Sending may have taken the descriptor's sign that there is something to receive."""
        if self.lost is None and self.client.group.has_messages():
            self._loop.call_soon(self._pump)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            results = self._results.get(output.request_id)
            if results is not None:
                results.put(output)
                if output.finished:
                    del self._results[output.request_id]
                    self.num_finished += all(c.finish_reason in ("stop", "length") for c in output.outputs)

    def _fail(self, step: FailedStep) -> None:
        for output in step.requests:
            results = self._results.get(output.request_id)
            if results is not None:
                self.forget([output.request_id, *results.request_ids])
                results.fail(UBatchFailed(step.message))

    def _note_loss(self, error: HocketError) -> bool:
        """Whether the ranks are gone; then everybody is told."""
        if not self.client.group.closed:
            return False
        if self.lost is None:
            self.lost = error
            self.close()
            self.fail_all(error)
            self._on_lost(error)
        return True
