"""The step exchange on threads: every rank gets the same table; late and dead ranks are named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.dist.exchange import Hub, Leaf, SoloExchange, StepExchange, Table, listen
from hocket.errors import RankLost

TIMEOUT_S = 5.0


def run_ranks(path: Path, size: int, body: Callable[[int, StepExchange], object], timeout_s: float = TIMEOUT_S) -> list:
    """Run `body(rank, exchange)` on `size` threads; returns results or exceptions by rank."""
    results: list = [None] * size
    listener = listen(str(path / "exchange"))

    def rank_main(rank: int) -> None:
        exchange: StepExchange
        try:
            if rank == 0:
                exchange = Hub(listener, list(range(size)), timeout_s)
                exchange.accept(TIMEOUT_S)
            else:
                exchange = Leaf(str(path / "exchange"), rank, 0, TIMEOUT_S, timeout_s)
            try:
                results[rank] = body(rank, exchange)
            finally:
                exchange.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def values(table: Table) -> list[list[int]]:
    """The table without the arrival time."""
    return [list(column[:-1]) for column in table]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_same_table_at_every_step(tmp_path: Path, size: int) -> None:
    def body(rank: int, exchange: StepExchange) -> list:
        return [values(exchange.exchange([rank, step, -rank, 0])) for step in range(50)]

    results = run_ranks(tmp_path, size, body)
    expected = [[[rank, step, -rank] for rank in range(size)] for step in range(50)]
    assert all(result == expected for result in results), results


def test_one_rank_alone_gets_its_own_column() -> None:
    assert values(SoloExchange().exchange([7, 8, 0])) == [[7, 8]]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_rank_is_named_by_everybody(tmp_path: Path, late: int) -> None:
    def body(rank: int, exchange: StepExchange) -> None:
        exchange.exchange([0, 0])
        if rank == late:
            time.sleep(1.5)
        exchange.exchange([1, 0])

    results = run_ranks(tmp_path, 3, body, timeout_s=0.5)
    for rank in {0, 1, 2} - {late}:
        assert isinstance(results[rank], RankLost)
        assert f"rank {late} " in str(results[rank])


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_rank_is_named_at_once(tmp_path: Path, dead: int) -> None:
    def body(rank: int, exchange: StepExchange) -> float:
        exchange.exchange([0, 0])
        if rank == dead:
            return 0.0
        started = time.monotonic()
        with pytest.raises(RankLost, match=f"rank {dead} "):
            exchange.exchange([1, 0])
        return time.monotonic() - started

    results = run_ranks(tmp_path, 3, body)
    assert all(isinstance(r, float) and r < 2.0 for r in results), results


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    hub = Hub(listen(str(tmp_path / "exchange")), [0, 1, 2], TIMEOUT_S)
    leaf = threading.Thread(target=lambda: Leaf(str(tmp_path / "exchange"), 1, 0, TIMEOUT_S, TIMEOUT_S).close())
    leaf.start()
    with pytest.raises(RankLost, match="rank 2 did not join"):
        hub.accept(0.3)
    leaf.join()
    hub.close()


def test_the_socket_is_only_for_this_user(tmp_path: Path) -> None:
    listener = listen(str(tmp_path / "exchange"))
    assert (tmp_path / "exchange").stat().st_mode & 0o077 == 0
    listener.close()
