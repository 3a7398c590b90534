"""The engine's client on an event loop: who waits gets its own results, and whoever leaves is aborted on its rank."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_ranks import FakeGroup

from hocket.balance import Balance
from hocket.channel.messages import Abort, AddRequests
from hocket.client import EngineClient
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import ConfigError, HocketError, RankLost, UBatchFailed
from hocket.processor import Processor
from hocket.request import SamplingParams
from hocket.server.async_client import AsyncClient, Closed, Results

PARAMS = SamplingParams(max_tokens=8, temperature=0)
LIMIT_S = 20.0


def run(test: Callable[[AsyncClient, FakeGroup, list[HocketError]], Awaitable[Any]], **group: Any) -> Any:
    """`test` on a loop, with a client of two ranks that answer 1, 2, 3, …"""
    config = resolve(Options(data_parallel_size=2, enable_expert_parallel=True))
    fake = FakeGroup(lambda request: range(1, 100), **group)
    lost: list[HocketError] = []

    async def main() -> Any:
        processor = Processor(tokenizer=None, vocab_size=512, max_model_len=64, eos_token_ids=[0])
        client: Any = EngineClient(config, fake, processor)  # type: ignore[arg-type]
        client.balance = Balance(2, by_tokens=True)
        made = AsyncClient(client, lost.append)
        try:
            async with asyncio.timeout(LIMIT_S):
                result = await test(made, fake, lost)
            if made.lost is None:
                assert made.num_requests == 0
                assert client.num_requests_per_rank() == [0, 0]
                assert client.num_tokens_per_rank() == [0, 0]
                assert processor.num_unfinished == 0
            return result
        finally:
            made.close()

    return asyncio.run(main())


async def ids_of(results: Results) -> dict[int, list[int]]:
    found = {}
    async for position, output in results:
        found[position] = output.outputs[0].token_ids
    return found


def test_many_wait_at_once() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        params = [SamplingParams(max_tokens=1 + i % 7, temperature=0) for i in range(40)]
        results = [client.submit([(str(i), [5, 6], p, None)], whole=i % 2 == 0) for i, p in enumerate(params)]
        found = await asyncio.gather(*map(ids_of, results))
        assert [one[0] for one in found] == [list(range(1, 2 + i % 7)) for i in range(40)]

    run(test)


def test_results_come_as_they_grow_and_slow_readers_miss_nothing() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        fake.paused = True
        results = client.submit([("a", [5], PARAMS, 0), ("b", [5], PARAMS, 1)])
        seen = []
        for _ in range(3):
            fake.step()
            client._pump()
            for _ in range(2):
                position, output = await anext(results)
                seen.append((position, len(output.outputs[0].token_ids)))
        assert seen == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
        for _ in range(5):  # nobody reads meanwhile
            fake.step()
            client._pump()
        assert await ids_of(results) == {0: list(range(1, 9)), 1: list(range(1, 9))}

    run(test)


def test_whoever_leaves_is_aborted_on_its_rank() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        fake.paused = True
        staying = client.submit([("staying", [5], PARAMS, 0)])
        leaving = client.submit([("leaving", [5], PARAMS, 1), ("too", [5], PARAMS, 0)])
        waiter = asyncio.create_task(ids_of(leaving))
        await asyncio.sleep(0)
        leaving.close()
        with pytest.raises(Closed):
            await waiter
        aborts = [(rank, m.request_ids) for rank, m in fake.sent if isinstance(m, Abort)]
        assert sorted(aborts) == [(0, ["too"]), (1, ["leaving"])]
        leaving.close()
        assert len(fake.sent) == 5
        fake.paused = False
        client._pump()
        assert await ids_of(staying) == {0: list(range(1, 9))}
        staying.close()

    run(test)


def test_an_abort_ends_with_what_there_is() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        fake.paused = True
        results = client.submit([("a", [5], PARAMS, None)], whole=True)
        fake.step()
        client._pump()
        assert client.abort(["a", "unknown"]) == ["a"]
        _, output = await anext(results)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([1], "abort")

    run(test)


def test_a_wrong_request_leaves_no_trace() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        with pytest.raises(ConfigError, match="prompt_token_ids"):
            client.submit([("a", [5], PARAMS, None), ("b", [512], PARAMS, None)])
        assert not fake.sent

    run(test)


def test_a_failed_step_ends_its_requests_alone() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: list[HocketError]) -> None:
        fake.paused = True
        failing = client.submit([("a", [5], PARAMS, None), ("b", [5], PARAMS, None)])
        fake.fail_step("step 3 failed")
        with pytest.raises(UBatchFailed, match="step 3 failed"):
            await anext(failing)
        fake.paused = False
        assert await ids_of(client.submit([("c", [5], PARAMS, None)])) == {0: list(range(1, 9))}
        assert not lost

    run(test)


def test_a_lost_rank_is_told_to_all_who_wait_and_who_come() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: list[HocketError]) -> None:
        fake.paused = True
        waiting = [asyncio.create_task(ids_of(client.submit([(str(i), [5], PARAMS, None)]))) for i in range(4)]
        await asyncio.sleep(0)
        fake.lose("rank 1 ended unexpectedly")
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, RankLost)
            assert str(outcome) == "rank 1 ended unexpectedly"
        with pytest.raises(RankLost, match="rank 1 ended"):
            client.submit([("late", [5], PARAMS, None)])
        assert [str(error) for error in lost] == ["rank 1 ended unexpectedly"]

    run(test)


def test_only_what_ended_by_itself_counts_as_finished() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        fake.paused = True
        aborted = client.submit([("a", [5], PARAMS, None)])
        assert client.abort(["a"]) == ["a"]
        await ids_of(aborted)
        assert client.num_finished == 0
        fake.paused = False
        await ids_of(client.submit([("b", [5], PARAMS, None)]))
        assert client.num_finished == 1

    run(test)


def test_balance_goes_by_tokens_still_to_compute() -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: Any) -> None:
        fake.paused = True
        long, short = SamplingParams(max_tokens=40, temperature=0), SamplingParams(max_tokens=2, temperature=0)
        results = [client.submit([("long", [5] * 20, long, None)])]
        results += [client.submit([(f"s{i}", [5], short, None)]) for i in range(5)]
        ranks = {m.requests[0].request_id: rank for rank, m in fake.sent if isinstance(m, AddRequests)}
        assert ranks == {"long": 0} | {f"s{i}": 1 for i in range(5)}
        assert client.client.num_tokens_per_rank() == [60, 15]
        fake.step()
        client._pump()
        assert client.client.num_tokens_per_rank() == [39, 5]
        for result in results:
            result.close()

    run(test)


def test_nobody_waits_for_ever_where_the_front_itself_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: AsyncClient, fake: FakeGroup, lost: list[HocketError]) -> None:
        def broken(output: Any) -> None:
            raise KeyError("a fault of ours")

        client.client.processor.process = broken  # type: ignore[method-assign]
        with pytest.raises(HocketError, match="the front failed: KeyError"):
            await ids_of(client.submit([("a", [5], PARAMS, None)]))
        assert fake.closed
        assert len(lost) == 1

    run(test)
    assert "a fault of ours" in caplog.text
